"""What a tenant may use: one reservation over all scopes, settled once."""
