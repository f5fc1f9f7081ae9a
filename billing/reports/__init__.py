"""What finance and operators read: margin, receivables and the end of a month."""
