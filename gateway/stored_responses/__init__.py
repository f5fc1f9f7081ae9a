"""Responses that are stored, and requests that build on them."""
