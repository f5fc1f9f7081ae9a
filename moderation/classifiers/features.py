"""Words of a text as numbers: hashed word, pair and in-word n-gram features, cached by word.

Only crc32 and integer arithmetic, so training and inference agree on every machine.
"""

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

BUCKETS: Final = 1 << 17
GRAM_BUCKETS: Final = 1 << 15
_MASK = BUCKETS - 1
_PAIR_FACTOR: Final = 1_000_003
_LONGEST_WORD = 24
_MOST_WORDS = 3_000
MOST_CACHED: Final = 30_000
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


class Lexicon:
    """Numbers for words: those of a vocabulary have their own for good, others while cached.

    Numbers index `hashes`. A full cache is emptied by handing its numbers out anew. Not to be
    shared between threads without a lock.
    """

    def __init__(self, vocabulary: Sequence[str] = ()) -> None:
        self.size = len(vocabulary) + MOST_CACHED
        self.hashes = [0] * self.size
        self._known = len(vocabulary)
        self._next = self._known
        self._numbers = {word: number for number, word in enumerate(vocabulary)}
        self._words = [*vocabulary, *[""] * MOST_CACHED]
        for number, word in enumerate(vocabulary):
            self.hashes[number] = word_hash(word) & _MASK

    def numbers(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Number the words of a batch, at most `MOST_CACHED` in all; good until the next call."""
        try:
            return [[self._numbers[word] for word in words] for words in texts]
        except KeyError:
            self._make_room(sum(map(len, texts)))
            return [self._numbers_with_new(words) for words in texts]

    def _make_room(self, wanted: int) -> None:
        if self._next + wanted > self.size:
            kept = self._words[: self._known]
            self._numbers = {word: number for number, word in enumerate(kept)}
            self._next = self._known

    def _numbers_with_new(self, words: Sequence[str]) -> list[int]:
        found = []
        for word in words:
            number = self._numbers.get(word)
            if number is None:
                number = self._next
                self._next += 1
                self._words[number] = word
                self.hashes[number] = word_hash(word) & _MASK
                self.added(number, word)
                self._numbers[word] = number
            found.append(number)
        return found

    def added(self, number: int, word: str) -> None:
        """Called for each word outside the vocabulary when it gets its number."""

    def word(self, number: int) -> str:
        return self._words[number]

    def pairs(self, numbers: Sequence[int]) -> list[int]:
        """Return the distinct ids of the words and of the pairs of neighbours, in order."""
        known = self.hashes
        hashes = [known[number] for number in numbers]
        ids = {(a * _PAIR_FACTOR + b) & _MASK for a, b in pairwise(hashes)}
        ids.update(hashes)
        return sorted(ids)


def gram_ids(word: str) -> list[int]:
    return [word_hash(gram) & _MASK for gram in in_word_grams(word)]
