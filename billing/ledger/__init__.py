"""The double-entry ledger, and credit in it."""
