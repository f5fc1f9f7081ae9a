"""Encodes short ASCII texts word by word from a cache of words.

A byte-level BPE splits a text into words before it merges anything, and a word's ids do not depend on
its neighbours. For ASCII the common split patterns can be expressed with `re`, and Unicode
normalisation changes nothing. Other texts and other tokenizers are left to the tokenizer itself.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer, models

_MAX_TEXT = 1_024  # characters; longer texts are left to the tokenizer, in a thread
_MAX_WORD = 32
_MAX_WORDS = 30_000
_MAX_NEW_WORDS = (
    8  # unknown words per text; encoding more of them singly is slower than the whole text
)

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


class WordCache:
    """Of one tokenizer. Shared by all tenants, like the word cache inside the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = _word_pattern(tokenizer)
        added = {each.content: at for at, each in tokenizer.get_added_tokens_decoder().items()}
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._cached: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text without special tokens; None when the cache does not apply."""
        if self._words is None or len(text) > _MAX_TEXT or not text.isascii():
            return None
        cached, new, result = self._cached, 0, list[int]()
        for index, part in enumerate(self._marks.split(text)):
            if index % 2:
                result.append(self._added[part])
                continue
            for word in self._words.findall(part):
                ids = cached.get(word)
                if ids is None:
                    new += 1
                    if new > _MAX_NEW_WORDS:
                        return None
                    ids = self._encode(word)
                result += ids
        return result

    def _encode(self, word: str) -> list[int]:
        ids = list(self._tokenizer.encode(word, add_special_tokens=False).ids)
        if len(word) <= _MAX_WORD:
            if len(self._cached) >= _MAX_WORDS:
                self._cached = {}
            self._cached[word] = ids
        return ids


def _word_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The pattern that splits ASCII text into the tokenizer's words; None when it is unknown."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.dropout:
        return None
    normalizer, post = _state_of(tokenizer.normalizer), _state_of(tokenizer.post_processor)
    if normalizer is not None and normalizer["type"] not in _NORMAL_FORMS:
        return None
    if any(each["type"] not in _ADD_NOTHING for each in _parts(post, "processors")):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    # Such tokens depend on their neighbours, or are matched in two passes.
    if any(each.single_word or each.lstrip or each.rstrip for each in added):
        return None
    if len({each.normalized for each in added}) > 1 or not all(each.content for each in added):
        return None
    source = _source(_parts(_state_of(tokenizer.pre_tokenizer), "pretokenizers"))
    if source is None:
        return None
    for written, ascii_class in ((r"\p{L}\p{N}]", "A-Za-z0-9]"), (r"\p{L}", "[A-Za-z]")):
        source = source.replace(written, ascii_class)
    return re.compile(source.replace(r"\p{N}", "[0-9]"), re.ASCII)


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
