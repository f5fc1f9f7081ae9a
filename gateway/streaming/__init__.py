"""From an engine's chunks to what the client gets."""
