"""Requests that end in every way, and what their clients saw."""
