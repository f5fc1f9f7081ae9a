"""The HTTP server: listening socket, worker processes, startup."""
