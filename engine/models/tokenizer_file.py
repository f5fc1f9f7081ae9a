"""The tokenizer of a checkpoint, which the engine needs only to follow grammars."""

from pathlib import Path

from engine.models.gguf.describe import describe


def tokenizer_json(path: Path | None) -> str | None:
    """The text of its tokenizer.json; of a GGUF file, what that would be. None if it has none."""
    if path is None:
        return None
    if path.is_file():
        return str(describe(path).tokenizer.to_str())
    file = path / "tokenizer.json"
    return file.read_text(encoding="utf-8") if file.is_file() else None
