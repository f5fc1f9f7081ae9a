"""Engine clients: one port, four implementations."""
