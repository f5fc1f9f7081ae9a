"""Invoices, budgets and usage of an organisation; the bodies of billing routes."""
