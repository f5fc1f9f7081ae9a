"""The payment provider port on Stripe's Python library."""
