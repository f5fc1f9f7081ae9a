"""Adjustments of balances, which a second person may have to approve."""
