"""Several residual streams on a GPU."""
