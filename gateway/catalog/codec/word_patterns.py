"""Recognises byte-level tokenizers, and the patterns by which they split a text into words."""

import json
import re
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own
)
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_ADD_NOTHING = (
    "ByteLevel",
    "TemplateProcessing",
)  # post-processors that add nothing without special tokens


def word_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The pattern that splits ASCII text into the tokenizer's words; None when it is unknown."""
    if not keeps_bytes(tokenizer):
        return None
    post = _state_of(tokenizer.post_processor)
    if any(each["type"] not in _ADD_NOTHING for each in _parts(post, "processors")):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    # Tokens that are matched in two passes depend on their neighbours.
    if len({each.normalized for each in added}) > 1 or not all(each.content for each in added):
        return None
    source = _source(_parts(_state_of(tokenizer.pre_tokenizer), "pretokenizers"))
    if source is None:
        return None
    for written, ascii_class in ((r"\p{L}\p{N}]", "A-Za-z0-9]"), (r"\p{L}", "[A-Za-z]")):
        source = source.replace(written, ascii_class)
    return re.compile(source.replace(r"\p{N}", "[0-9]"), re.ASCII)


def keeps_bytes(tokenizer: Tokenizer) -> bool:
    """Whether every byte of a normalised text is part of exactly one token: a byte-level BPE."""
    model, normalizer = tokenizer.model, _state_of(tokenizer.normalizer)
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    if normalizer is not None and normalizer["type"] not in _NORMAL_FORMS:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    # Such tokens depend on their neighbours, and swallow white space.
    if any(each.single_word or each.lstrip or each.rstrip for each in added):
        return False
    steps = _parts(_state_of(tokenizer.pre_tokenizer), "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        return False
    return all(
        each["type"] in ("ByteLevel", "Digits") or _isolates(each) for each in steps
    ) and _has_every_byte(tokenizer)


def ends_words_before_marks(tokenizer: Tokenizer) -> bool:
    """Whether a word always ends between an ASCII letter or digit and an ASCII character that is
    neither, unless both are of one added token."""
    if word_pattern(tokenizer) is not None:
        return True
    steps = _parts(_state_of(tokenizer.pre_tokenizer), "pretokenizers")
    # SmolLM: single digits, then the words of GPT-2.
    return (
        keeps_bytes(tokenizer)
        and [each["type"] for each in steps] == ["Digits", "ByteLevel"]
        and bool(steps[-1]["use_regex"])
        and not steps[-1]["add_prefix_space"]
    )


def _isolates(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Split" and step["behavior"] != "Removed")


def _has_every_byte(tokenizer: Tokenizer) -> bool:
    """A byte-level vocabulary has one character per byte; missing bytes are dropped from a text."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())


def _source(steps: list[dict[str, Any]]) -> str | None:
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    *before, last = steps
    if not before:
        return _GPT2 if last["use_regex"] else None
    split = before[0]
    if len(before) > 1 or last["use_regex"] or split["type"] != "Split":
        return None
    source = str(split["pattern"].get("Regex"))
    plain = split["behavior"] == "Isolated" and not split["invert"]
    return source if plain and source in (_QWEN, _LLAMA) else None


def _state_of(part: Any) -> dict[str, Any] | None:
    return None if part is None else dict(json.loads(part.__getstate__()))


def _parts(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if state is None:
        return []
    return list(state[name]) if state["type"] == "Sequence" else [state]
