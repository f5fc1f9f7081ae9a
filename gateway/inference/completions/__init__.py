"""OpenAI's legacy Completions API."""
