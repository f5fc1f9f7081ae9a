"""Ranks: processes that compute parts of one model, step by step, as the first of them says."""
