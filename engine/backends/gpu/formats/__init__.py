"""Products of quantised weights."""
