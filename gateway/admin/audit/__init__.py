"""The audit log, and the audit of the books."""
