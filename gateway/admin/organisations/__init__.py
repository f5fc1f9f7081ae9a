"""Organisations and the units that are billed with them."""
