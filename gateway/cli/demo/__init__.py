"""`tollhouse demo`: a server with traffic."""
