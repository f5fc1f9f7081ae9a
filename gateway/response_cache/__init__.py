"""Complete answers of a tenant that are given again to the same request."""
