"""Complete answers of a tenant, given again."""
