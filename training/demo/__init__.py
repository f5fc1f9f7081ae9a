"""Trains the demo model and its adapters."""
