"""A chat in the terminal, over the public REST API."""
