"""Weights as kernels of a GPU read them."""
