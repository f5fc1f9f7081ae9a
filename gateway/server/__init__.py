"""The socket and the processes behind it."""
