"""Acts on money that a person asks for: previewed, confirmed and undone."""
