"""The command of invoices."""
