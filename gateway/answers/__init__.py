"""From an engine's output to what the client reads."""
