"""Limits of organisations, projects and keys."""
