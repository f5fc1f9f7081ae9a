"""Adapters: their routes, vLLM's routes for them, and their command."""
