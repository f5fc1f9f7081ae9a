"""Words of a text as numbers: hashed word, pair and in-word n-gram features, cached by word.

Only crc32 and integer arithmetic, so training and inference agree on every machine.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

BUCKETS: Final = 1 << 17
GRAM_BUCKETS: Final = 1 << 15
_MASK = BUCKETS - 1
_PAIR_FACTOR: Final = 1_000_003
_LONGEST_WORD = 24
_MOST_WORDS = 3_000
_MOST_CACHED = 60_000
# Letters with an inner apostrophe, digits, or one sign; emoji are signs.
_TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\w\s]|\w")


def words_of(text: str) -> list[str]:
    """Return the tokens of a folded text in lower case."""
    return _TOKEN.findall(text.lower())[:_MOST_WORDS]


def word_hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))


def in_word_grams(word: str) -> list[str]:
    """Return the n-grams of 3 to 5 characters of a word, its edges marked by a space."""
    padded = f" {word[:_LONGEST_WORD]} "
    return [padded[i : i + n] for n in (3, 4, 5) for i in range(len(padded) - n + 1)]


@dataclass(frozen=True, slots=True)
class WordFeatures:
    hash: int
    grams: Ids


class FeatureTable:
    """Turns tokens into feature ids; remembers the words that it has seen."""

    def __init__(self) -> None:
        self._known: dict[str, WordFeatures] = {}

    def word(self, word: str) -> WordFeatures:
        found = self._known.get(word)
        if found is None:
            hashes = [word_hash(gram) & _MASK for gram in in_word_grams(word)]
            found = WordFeatures(word_hash(word), np.array(hashes, dtype=np.int64))
            if len(self._known) >= _MOST_CACHED:
                self._known.clear()
            self._known[word] = found
        return found

    def ids(self, words: Sequence[str]) -> tuple[Ids, Ids]:
        """Return the distinct word and pair ids, and the distinct in-word n-gram ids."""
        features = [self.word(word) for word in words]
        hashes = np.array([each.hash for each in features], dtype=np.int64)
        pairs = (hashes[:-1] * _PAIR_FACTOR + hashes[1:]) & _MASK
        grams = {id(each): each.grams for each in features}
        none = np.zeros(0, dtype=np.int64)
        return (
            distinct(np.concatenate([hashes & _MASK, pairs])),
            distinct(np.concatenate([none, *grams.values()])),
        )


def distinct(ids: Ids) -> Ids:
    """Return sorted ids without repeats; faster than numpy.unique on short arrays."""
    if len(ids) < 2:
        return ids
    ids = np.sort(ids)
    keep = np.empty(len(ids), dtype=bool)
    keep[0] = True
    np.not_equal(ids[1:], ids[:-1], out=keep[1:])
    return ids[keep]
