"""Copies of cached KV blocks outside the pool: in host memory, on a disk, in Redis."""
