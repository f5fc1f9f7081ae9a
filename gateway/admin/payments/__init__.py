"""Payments, refunds and the payment provider's events."""
