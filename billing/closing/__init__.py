"""Closed days: their sums are frozen and signed, and their rows move to the archive."""
