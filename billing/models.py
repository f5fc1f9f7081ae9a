"""Tables of the counting-house."""
