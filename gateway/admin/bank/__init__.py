"""Lines of bank statements and what they pay."""
