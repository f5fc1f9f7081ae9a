"""Quantised matrices and their products on a CPU."""
