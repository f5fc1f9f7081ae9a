"""Guesses of the next tokens, which the model verifies in one step."""
