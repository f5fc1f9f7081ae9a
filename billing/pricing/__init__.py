"""Prices of usage, engines and currencies."""
