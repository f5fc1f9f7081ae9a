"""One folder a noun: its routes and its command."""
