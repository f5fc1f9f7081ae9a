"""A whole production house of real processes, and what strikes its parts."""
