"""Adapters: their files, memory, registry and tiers."""
