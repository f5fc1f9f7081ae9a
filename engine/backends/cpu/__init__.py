"""A model's operations on a CPU."""
