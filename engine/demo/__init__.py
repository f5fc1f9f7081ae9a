"""The demo model: its recipe, its text and its weights."""
