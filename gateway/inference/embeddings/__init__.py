"""OpenAI's Embeddings API."""
