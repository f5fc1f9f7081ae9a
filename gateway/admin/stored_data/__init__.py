"""What the platform stores of a tenant: its export, its erasure, and that of one end user."""
