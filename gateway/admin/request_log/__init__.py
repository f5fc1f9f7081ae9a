"""Settings of the request log."""
