"""Encodes short ASCII texts word by word from a cache of words.

A byte-level BPE splits a text into words before it merges anything, and a word's ids do not depend on
its neighbours. For ASCII the common split patterns can be expressed with `re`, and Unicode
normalisation changes nothing. Other texts and other tokenizers are left to the tokenizer itself.
"""

import re
from itertools import chain

from tokenizers import Tokenizer

from gateway.catalog.codec.word_patterns import word_pattern

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
        words, cached = self._words.findall(part), self._cached
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
