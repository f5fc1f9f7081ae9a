"""The audit compares receipts, events, charges, ledger and invoices, each with the step before it."""
