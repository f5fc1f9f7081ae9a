"""`tollhouse demo`: a minute of mixed traffic, and what it came to."""
