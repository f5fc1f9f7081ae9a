"""Products of quantised matrices and of experts."""
