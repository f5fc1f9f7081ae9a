"""Organisations above organisations, and their usage rolled up."""
