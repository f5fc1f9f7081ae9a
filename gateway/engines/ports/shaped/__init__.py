"""Providers whose API has OpenAI's form, with fields and rules of their own."""
