"""Attention over latent vectors."""
