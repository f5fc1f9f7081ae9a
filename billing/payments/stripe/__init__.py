"""Stripe behind the port, through its own library."""
