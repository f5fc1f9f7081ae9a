"""`tollhouse demo`: a minute of mixed traffic and a summary of its usage."""
