"""Who comes in: from a header or a session to a principal."""
