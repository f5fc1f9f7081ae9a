"""The HTTP gateway: request pipeline, CLI and composition root. Owns no tables."""
