"""Requests from a file, through the same door behind all others."""
