"""Second opinions: guard models that generate, and remote moderation APIs."""
