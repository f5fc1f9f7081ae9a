"""Taxes on what an invoice supplies."""
