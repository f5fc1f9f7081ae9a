"""Trains the adapters of SmolLM2."""
