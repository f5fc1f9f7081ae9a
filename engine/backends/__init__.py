"""Layers and their products, on a CPU and on a GPU."""
