"""Responses that run in the background, and the storing of responses."""
