"""Quantised matrices on a GPU: their layout, and the linear layers made of them."""
