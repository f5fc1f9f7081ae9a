"""Which models and adapters there are, and what each can do."""
