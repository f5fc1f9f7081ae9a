"""Features of a text: hashed words, word pairs and in-word n-grams, cached per word.

Uses only crc32 and integer arithmetic, so training and inference agree on every machine.
"""

import re
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Final

BUCKETS: Final = 1 << 17
GRAM_BUCKETS: Final = 1 << 15
BUCKET_MASK: Final = BUCKETS - 1
_PAIR_FACTOR: Final = 1_000_003
_LONGEST_WORD = 24
_LONGEST_RUN = 24  # longest cached run: longer ones rarely recur
MOST_WORDS = 3_000
# A cached word takes 1.7 kB of a scorer's tables, so the caches of four scorers at most 80 MB.
MOST_CACHED: Final = 4 * MOST_WORDS
# Letters with an inner apostrophe, digits, or one sign; emoji are signs.
TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\w\s]|\w")


def words_of(text: str) -> list[str]:
    """Return the tokens of a folded text in lower case."""
    return TOKEN.findall(text.lower())[:MOST_WORDS]


def word_hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))


def in_word_grams(word: str) -> list[str]:
    """Return the n-grams of 3 to 5 characters of a word, its edges marked by a space."""
    padded = f" {word[:_LONGEST_WORD]} "
    return [padded[i : i + n] for n in (3, 4, 5) for i in range(len(padded) - n + 1)]


def gram_hashes(word: str) -> list[int]:
    """The hashes of `in_word_grams`; of an ASCII word from slices of its bytes, in half the time."""
    if not word.isascii():
        return [word_hash(gram) for gram in in_word_grams(word)]
    padded = b" %b " % word[:_LONGEST_WORD].encode()
    hashed, size = zlib.crc32, len(padded)
    return [hashed(padded[i : i + n]) for n in (3, 4, 5) for i in range(size - n + 1)]


class WordNumbers:
    """The numbers of a vocabulary's words, and ranges of further numbers for the words that lexicons
    cache. Lexicons may share it: a vocabulary word has the same number in all of them."""

    def __init__(
        self, vocabulary: Sequence[str] = (), cached: Sequence[int] = (MOST_CACHED,)
    ) -> None:
        self.vocabulary = {word: number for number, word in enumerate(vocabulary)}
        ends = list(accumulate(cached, initial=len(vocabulary)))
        self.size = ends[-1]
        self.hashes = [0] * self.size
        self.leads = [0] * self.size  # a word's part of a pair's hash in which it is the first
        self._ranges = deque(range(*each) for each in pairwise(ends))

    def take_range(self) -> range:
        """Of a lexicon's cached words. IndexError when all are taken."""
        return self._ranges.popleft()


class Lexicon:
    """Numbers words: vocabulary words permanently, others while they are cached.

    When the cache is full, its numbers are reused. Not thread-safe; lexicons that share their
    `WordNumbers` are safe to use concurrently.
    """

    def __init__(self, shared: WordNumbers | None = None) -> None:
        shared = shared or WordNumbers()
        self.vocabulary = shared.vocabulary
        self._hashes, self._leads = shared.hashes, shared.leads
        self._range = shared.take_range()
        self._next = self._range.start
        self.reused = 0  # how often the numbers of words were given to others
        self._numbers: dict[str, int] = {}  # of the words that this lexicon has read
        # By run of characters between white space, mostly a word.
        self._runs: dict[str, list[int]] = {}

    def read(self, text: str) -> list[int]:
        """The numbers of the words (`words_of`) of a folded text; valid until the next call."""
        runs, known = text.lower().split(), self._runs
        try:
            return list(chain.from_iterable(map(known.__getitem__, runs)))[:MOST_WORDS]
        except KeyError:
            return self._read(runs)

    def _read(self, runs: Sequence[str]) -> list[int]:
        self._evict_if_full(2 * MOST_WORDS)
        found: list[Sequence[int] | None] = list(map(self._runs.get, runs))
        new, at = 0, -1
        while new < MOST_WORDS and None in found:
            at = found.index(None, at + 1)
            run = runs[at]
            known = [self.number(word) for word in TOKEN.findall(run)[:MOST_WORDS]]
            if len(run) <= _LONGEST_RUN and len(self._runs) < len(self._range):
                self._runs[run] = known
            found[at], new = known, new + len(known)
        return list(chain.from_iterable(filter(None, found)))[:MOST_WORDS]

    def numbers(self, words: Sequence[str]) -> list[int]:
        """The numbers of words; valid until the next call."""
        try:
            return [self._numbers[word] for word in words]
        except KeyError:
            self._evict_if_full(len(words))
            return [self.number(word) for word in words]

    @property
    def known(self) -> dict[str, int]:
        """The numbers of the words read so far; another mapping once numbers were given to others."""
        return self._numbers

    def take_number(self) -> int:
        """One that is given to no word."""
        self._range = self._range[:-1]
        return self._range.stop

    def make_room(self, wanted: int) -> None:
        """For so many new words; the numbers of cached words may be used for them (`reused`)."""
        if self._next + wanted > self._range.stop:
            self._evict_if_full(wanted)

    def _evict_if_full(self, wanted: int) -> None:
        if len(self._runs) >= len(self._range):
            self._runs = {}
        if self._next + wanted > self._range.stop:
            known = self.vocabulary
            self._numbers = {word: at for word, at in self._numbers.items() if word in known}
            self._next = self._range.start
            self._runs = {}
            self.reused += 1

    def number(self, word: str) -> int:
        """The number of a word for which there is room."""
        if word in self._numbers:
            return self._numbers[word]
        number = self.vocabulary.get(word)
        if number is None:
            number = self._next
            if number == self._range.stop:
                raise IndexError("the words of one text do not fit a lexicon's cache")
            self._next += 1
        self._hashes[number] = hashed = word_hash(word) & BUCKET_MASK
        self._leads[number] = hashed * _PAIR_FACTOR & BUCKET_MASK
        self.on_new_word(number, word)
        self._numbers[word] = number
        return number

    def on_new_word(self, number: int, word: str) -> None:
        """Called when a word gets its number."""

    def pairs(self, numbers: Sequence[int]) -> list[int]:
        """Return the distinct ids of the words and of adjacent pairs, in order."""
        hashes, leads = [self._hashes[each] for each in numbers], self._leads
        after = hashes[1:]
        pairs = [
            (leads[first] + second) & BUCKET_MASK
            for first, second in zip(numbers, after, strict=False)
        ]
        return sorted({*hashes, *pairs})


def gram_ids(word: str) -> list[int]:
    return [each & BUCKET_MASK for each in gram_hashes(word)]
