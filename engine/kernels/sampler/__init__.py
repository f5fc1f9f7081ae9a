"""The choice of tokens on a GPU."""
