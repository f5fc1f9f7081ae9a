"""Audio and image requests."""
