"""A production deployment of real processes, and the faults injected into it."""
