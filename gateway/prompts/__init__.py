"""The prompt as the engine gets it."""
