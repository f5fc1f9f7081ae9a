"""Authentication: from a header or a session cookie to a principal."""
