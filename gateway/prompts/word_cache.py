"""Encodes short ASCII texts word by word from a cache of words.

A byte-level BPE splits a text into words before it merges anything, and a word's ids do not depend on
its neighbours. For ASCII the common split patterns can be expressed with `re`, and Unicode
normalisation changes nothing. Other texts and other tokenizers are left to the tokenizer itself.
"""

import re
from itertools import chain

from tokenizers import Tokenizer

from gateway.prompts.word_patterns import word_pattern

_MAX_TEXT = 1_024  # characters; longer texts are left to the tokenizer, in a thread
_MAX_WORD = 32
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
        cached, new, result = self._cached, 0, list[int]()
        for index, part in enumerate(self._marks.split(text)):
            if index % 2:
                result.append(self._added[part])
                continue
            words = self._words.findall(part)
            found = list(map(cached.get, words))
            made: dict[str, list[int]] = {}
            for _ in range(found.count(None)):
                at = found.index(None)
                word = words[at]
                if word not in made:
                    new += 1
                    if new > _MAX_NEW_WORDS:  # what was encoded so far is known the next time
                        return None
                    made[word] = self._encode(word)
                found[at] = made[word]
            result.extend(chain.from_iterable(found))  # type: ignore[arg-type]
        return result

    def _encode(self, word: str) -> list[int]:
        ids = [token.id for token in self._merge(word.translate(_SHOWN))]
        if len(word) <= _MAX_WORD:
            if len(self._cached) >= _MAX_WORDS:
                self._cached = {}
            self._cached[word] = ids
        return ids
