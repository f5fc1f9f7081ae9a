"""Organisations, projects, members, API keys, and their permissions."""
