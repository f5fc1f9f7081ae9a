"""From usage events to invoices that can be proved."""
