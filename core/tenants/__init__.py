"""Organisations, projects, members, keys: who is at the door and what they may do."""
