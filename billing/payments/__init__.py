"""Payments, refunds and disputes, behind one port of providers."""
