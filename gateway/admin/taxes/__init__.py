"""Taxes and the seller's registrations."""
