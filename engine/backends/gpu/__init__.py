"""Triton kernels, their launches and torch references."""
