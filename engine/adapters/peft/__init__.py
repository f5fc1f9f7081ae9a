"""Reads adapters in PEFT's layout."""
