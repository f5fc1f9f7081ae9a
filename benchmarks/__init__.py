"""Measurements, each beside its peer; one file a benchmark."""
