"""The door: HTTP in, tokens out. Owns no tables."""
