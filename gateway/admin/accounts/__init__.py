"""Prices, billing accounts, credits and credit notes, for the operator."""
