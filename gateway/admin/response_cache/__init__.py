"""Settings of the response cache."""
