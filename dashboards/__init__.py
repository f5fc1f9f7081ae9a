"""The dashboard: server-rendered pages for tenants and the operator."""
