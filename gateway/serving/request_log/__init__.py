"""Records of requests for a tenant's own receiver."""
