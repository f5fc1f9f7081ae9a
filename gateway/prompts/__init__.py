"""Prompt preparation: order, chat template, tokenization, truncation."""
