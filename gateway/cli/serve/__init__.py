"""`tollhouse serve`: starts the processes and listens."""
