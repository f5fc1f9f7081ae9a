"""The tokenizer of a checkpoint, which the engine needs to follow grammars and to say which it is. No
torch: gateways read theirs with it.

The library takes memory by what a file says, and ends the process where there is none: such files are
refused here.
"""

import base64
import hashlib
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.models.gguf.describe import describe
from engine.regular_files import read_text

_MOST_ID = 1 << 24  # the library writes a vocabulary with memory for every id below the largest
_MOST_CHARACTERS = 10_000  # of a token
_MAP = "precompiled_charsmap"  # of a normalizer
_ESCAPED = re.compile(
    r"\\u00[2-7]"
)  # plain characters, as only somebody who hides a name writes them
_PANIC = "PanicException"  # of the library, which does not export it; it is no `Exception`


def tokenizer_json(path: Path | None) -> str | None:
    """The text of its tokenizer.json; of a GGUF file, what that would be. None if it has none. Raises
    CheckpointError naming a file that is no text."""
    if path is None:
        return None
    if path.is_file():
        return str(describe(path).tokenizer.to_str())
    file = path / "tokenizer.json"
    return _checked_text(file) if file.is_file() else None


def read_tokenizer(file: Path) -> Any:
    """A `tokenizers.Tokenizer` that neither pads nor cuts. Raises CheckpointError naming the file."""
    tokenizer = _parsed(_checked_text(file), file)
    _check_vocabulary(tokenizer, file)
    return tokenizer


def _parsed(text: str, file: Path) -> Any:
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_str(text)
    except BaseException as error:  # the library raises nothing narrower
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise CheckpointError(f"{file} is not a tokenizer that works: {str(error)[:300]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _checked_text(file: Path) -> str:
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if _MAP in text or _ESCAPED.search(text):
        try:
            written = json.loads(text).get("normalizer")
        except (ValueError, RecursionError, AttributeError) as error:
            raise CheckpointError(f"{file} is not JSON: {str(error)[:300]}") from None
        _check_maps(written, file)
    return text


def _check_maps(normalizer: Any, file: Path) -> None:
    """That a map of characters holds as much as it says: the first word is the bytes of its trie."""
    if isinstance(normalizer, list):
        for each in normalizer:
            _check_maps(each, file)
    if not isinstance(normalizer, dict):
        return
    _check_maps(normalizer.get("normalizers"), file)
    if _MAP not in normalizer:
        return
    try:
        raw = base64.b64decode(normalizer[_MAP], validate=True)
    except (TypeError, ValueError):
        raw = b""
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 or size % 4 or size > len(raw) - 4:
        raise CheckpointError(
            f"{file}: {_MAP} of its normalizer is not whole: {len(raw)} bytes, of which "
            f"{size} are its trie"
        )


def _check_vocabulary(tokenizer: Any, file: Path) -> None:
    """tokenizer: as the library has read it from `file`. Raises CheckpointError for an id that no
    vocabulary reaches, and for a token longer than any."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    long = next((text for text in vocabulary if len(text) > _MOST_CHARACTERS), None)
    if long is not None:
        raise CheckpointError(
            f"{file}: token {long[:40]!a} has {len(long)} characters, at most {_MOST_CHARACTERS} are "
            "read"
        )
    most = max(vocabulary.items(), key=lambda e: e[1], default=("", 0))
    if most[1] >= _MOST_ID:
        raise CheckpointError(
            f"{file}: token {most[0][:40]!a} has the id {most[1]}, ids must be below {_MOST_ID}"
        )


def tokenizer_digest(path: Path | None) -> str:
    """The SHA-256 of its tokenizer as the library writes it, the same for any file that it is read
    from; empty without one, or where the library cannot read it. Raises CheckpointError for ids that no
    vocabulary reaches."""
    text = tokenizer_json(path)
    if path is None or text is None:
        return ""
    file = path if path.is_file() else path / "tokenizer.json"
    try:
        tokenizer = _parsed(text, file)
    except CheckpointError:
        return ""
    _check_vocabulary(tokenizer, file)
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
