"""Gemma 3n's decoder with several residual streams."""
