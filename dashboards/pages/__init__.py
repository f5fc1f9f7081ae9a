"""The pages, one per file."""
