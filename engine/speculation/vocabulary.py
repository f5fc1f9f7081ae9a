"""The vocabulary of a checkpoint's tokenizer."""

import json
from pathlib import Path

from engine.models.tokenizer_file import tokenizer_json


def vocabulary_of(path: Path | None) -> dict[str, int] | None:
    """The id of each token; None for a checkpoint without a tokenizer."""
    text = tokenizer_json(path)
    if text is None:
        return None
    content = json.loads(text)
    found = content["model"]["vocab"]
    if not isinstance(found, dict):  # of Unigram models: pairs of a token and its score
        found = {token: number for number, (token, _) in enumerate(found)}
    added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
    return {**found, **added}
