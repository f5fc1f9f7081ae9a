"""Rerank and score, as Cohere and vLLM define them."""
