"""Authenticates a header as a principal; sign-in and revocation."""
