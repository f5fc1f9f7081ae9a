"""Adapters in PEFT layout: what their configuration says, and the tensors of their files."""
