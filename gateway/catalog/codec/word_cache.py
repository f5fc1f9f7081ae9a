"""Encodes short ASCII texts word by word from a cache of words.

A byte-level BPE splits a text into words before it merges anything, and a word's ids do not depend on
its neighbours. For ASCII the common split patterns can be expressed with `re`, and Unicode
normalisation changes nothing. Other texts and other tokenizers are left to the tokenizer itself.
"""

import json
import re
from itertools import chain
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from core import compiled

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
    return re.compile(_ascii(source), re.ASCII)


def _ascii(source: str) -> str:
    for written, ascii_class in ((r"\p{L}\p{N}]", "A-Za-z0-9]"), (r"\p{L}", "[A-Za-z]")):
        source = source.replace(written, ascii_class)
    return source.replace(r"\p{N}", "[0-9]")


# The most digits of a word, 0 for GPT-2's any number: by this the compiled split knows the pattern.
DIGITS = {_ascii(_GPT2): 0, _ascii(_QWEN): 1, _ascii(_LLAMA): 3}


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


_MAX_TEXT = 1_024  # characters; longer texts are left to the tokenizer, in a thread
_MAX_WORD = 32
_MAX_JOINED = 2  # words of a part that is cached as a whole; no longer text of a tenant is
_MAX_WORDS = 30_000
_MAX_NEW_WORDS = (
    8  # unknown words per text; encoding more of them singly is slower than the whole text
)
# A byte-level model reads bytes as the characters that stand for them: printable ones as themselves.
_SHOWN = dict(zip((*range(33), 127), map(chr, range(256, 290)), strict=True))


class WordCache:
    """Of one tokenizer. Shared by all tenants, like the word cache inside the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._words = word_pattern(tokenizer)
        # The merges alone, for a byte-level model: of a word, the pipeline around them takes four
        # times as long.
        self._merge = tokenizer.model.tokenize
        added = {each.content: at for at, each in tokenizer.get_added_tokens_decoder().items()}
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._cached: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text without special tokens; None when the cache does not apply."""
        if self._words is None or len(text) > _MAX_TEXT or not text.isascii():
            return None
        left = _MAX_NEW_WORDS
        result: list[int] = []
        for index, part in enumerate(self._marks.split(text)):
            if index % 2:
                result.append(self._added[part])
                continue
            ids = self._cached.get(part)  # such as the line that begins a turn
            if ids is None:
                ids, left = self._of_part(part, left)
                if ids is None:  # what was encoded so far is known the next time
                    return None
            result += ids
        return result

    def _of_part(self, part: str, left: int) -> tuple[list[int] | None, int]:
        """The ids of a text without marks, and how many of `left` new words remain; None for the ids
        where it has more."""
        assert self._words is not None
        cached = self._cached
        if compiled.word_ids is not None:
            found = compiled.word_ids(part, cached, DIGITS[self._words.pattern])
            if found is not None:
                ids, count = found
                if count <= _MAX_JOINED:
                    self._keep(part, ids)
                return ids, left
        words = self._words.findall(part)
        try:
            ids = list(chain.from_iterable(map(cached.__getitem__, words)))
        except KeyError:
            return self._with_new(words, left)
        if len(words) <= _MAX_JOINED:
            self._keep(part, ids)
        return ids, left

    def _with_new(self, words: list[str], left: int) -> tuple[list[int] | None, int]:
        known = {word: self._cached.get(word) for word in words}
        new = [word for word, ids in known.items() if ids is None]
        for word in new[:left]:
            known[word] = self._encode(word)
        if len(new) > left:
            return None, 0
        found = map(known.__getitem__, words)
        return list(chain.from_iterable(found)), left - len(new)  # type: ignore[arg-type]

    def _encode(self, word: str) -> list[int]:
        ids = [token.id for token in self._merge(word.translate(_SHOWN))]
        self._keep(word, ids)
        return ids

    def _keep(self, text: str, ids: list[int]) -> None:
        if len(text) <= _MAX_WORD:
            if len(self._cached) >= _MAX_WORDS:
                self._cached = {}
            self._cached[text] = ids
