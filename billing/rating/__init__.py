"""Rating: charges of usage, and their corrections."""
