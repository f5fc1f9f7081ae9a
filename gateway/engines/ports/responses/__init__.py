"""OpenAI's Responses API as an upstream."""
