"""Kernels of Gemma 3n's residual streams."""
