"""The archive of raw events and charges whose months retention drops from PostgreSQL."""
