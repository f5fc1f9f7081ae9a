"""Stored completions and responses, and the items that a request builds on."""
