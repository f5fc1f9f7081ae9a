"""GGUF files: header, configuration, tokenizer and quantised weights. Imports no torch."""

from engine.models.gguf.describe import GgufModel, describe

__all__ = ["GgufModel", "describe"]
