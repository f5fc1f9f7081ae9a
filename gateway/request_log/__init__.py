"""Records of requests for the tenant's own receiver."""
