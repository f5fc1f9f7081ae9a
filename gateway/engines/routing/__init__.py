"""Chooses the replica that runs a request."""
