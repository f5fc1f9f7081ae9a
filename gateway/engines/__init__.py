"""Engine clients: one port, four implementations, and where they come from."""
