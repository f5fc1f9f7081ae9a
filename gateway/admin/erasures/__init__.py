"""The erasure of an end user."""
