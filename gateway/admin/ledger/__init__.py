"""The ledger and its journal."""
