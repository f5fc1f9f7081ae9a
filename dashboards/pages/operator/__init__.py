"""Pages for the operator only, which span all tenants."""
