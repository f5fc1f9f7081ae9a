"""Alerts: their conditions, their runbooks, and whether a condition holds now."""
