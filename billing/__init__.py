"""Rating, ledger, invoices and payments: from usage events to reconciled invoices."""
