"""The tokenizer of a checkpoint, which the engine needs to follow grammars and to say which it is."""

import hashlib
from importlib import import_module
from pathlib import Path

from engine.models.gguf.describe import describe
from engine.regular_files import read_text


def tokenizer_json(path: Path | None) -> str | None:
    """The text of its tokenizer.json; of a GGUF file, what that would be. None if it has none."""
    if path is None:
        return None
    if path.is_file():
        return str(describe(path).tokenizer.to_str())
    file = path / "tokenizer.json"
    return read_text(file) if file.is_file() else None


def tokenizer_digest(path: Path | None) -> str:
    """The SHA-256 of its tokenizer as the library writes it, the same for any file that it is read
    from; empty without one, or where it cannot be read."""
    text = tokenizer_json(path)
    if text is None:
        return ""
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_str(text)
    except Exception:  # the library raises nothing narrower
        return ""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
