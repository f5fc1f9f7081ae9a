"""Pages that only the operator sees: they span all tenants."""
