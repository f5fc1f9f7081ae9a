"""From logits to tokens: sampling, penalties, truncation."""
