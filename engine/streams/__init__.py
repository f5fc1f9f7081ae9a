"""Decoders with several residual streams (AltUp), as Gemma 3n's."""
