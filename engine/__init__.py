"""The inference engine: token ids in, token ids out. Imports nothing of ours and no torch."""
