"""Models: fetched, quantised and listed."""
