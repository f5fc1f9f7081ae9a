"""What each word contributes to the scores of any text that contains it, computed once a word."""

from collections.abc import Mapping
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from moderation.classifiers.compiled import Kernel
from moderation.classifiers.features import (
    BUCKET_MASK,
    BUCKETS,
    GRAM_BUCKETS,
    MOST_CACHED,
    Lexicon,
    WordNumbers,
    gram_hashes,
)

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[np.generic]]

WIDTHS = (1, 2, 3)
_GRAMS = 24
_VERY_LOW = 1e9  # below any sum of a filter
_CACHED = (MOST_CACHED,) * 9  # of a scorer that mostly works alone, and of the others


def unpack(stored: Arrays, name: str) -> Floats:
    """Return an array as float32; integer arrays are stored with their scale."""
    values = np.asarray(stored[name])
    floats: Floats = values.astype(np.float32)
    if values.dtype.kind == "i":
        floats = floats * np.asarray(stored[f"{name}_scale"], dtype=np.float32)
    return floats


class Weights:
    """The weights that all scorers share; never changed."""

    def __init__(self, stored: Arrays) -> None:
        vocabulary = bytes(np.asarray(stored["vocabulary"], dtype=np.uint8))
        self.words = vocabulary.decode("utf-8").split("\n")
        self.linear = unpack(stored, "linear")
        self.grams = unpack(stored, "grams")
        self.vectors = unpack(stored, "vectors")
        self.filters = [_filters(stored, place) for place in range(len(WIDTHS))]


class WordTables(WordNumbers):
    """The contributions of words, by number; shared by the lexicons that write them.

    `rows` holds the linear weights of the hashed words and pairs and, from BUCKETS on, those of each
    word's n-grams, added up; `counts` tells how many. `phrases` holds a word's part of the filters as
    the first, second and last of three.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.words, _CACHED)
        self.weights = weights
        # A memory page of these is allocated when one of its words first occurs.
        self.rows = np.zeros((BUCKETS + self.size, weights.linear.shape[1]), np.float32)
        self.rows[:BUCKETS] = weights.linear[:BUCKETS]
        self.counts = [1] * self.size
        # The same as lists of Python's are slow to read from C.
        self.hash_array = np.zeros(self.size, np.int32)
        self.count_array = np.ones(self.size, np.int32)
        # Rows for padding: before a text, directly after it, and one position further.
        self.before, self.behind, self.beyond = self.size, self.size + 1, self.size + 2
        filters = weights.filters
        shape = self.size + len(WIDTHS), len(filters[-1][1])
        self.phrases = [np.zeros(shape, np.float32) for _ in WIDTHS]
        last, each = self.phrases[-1], len(filters[0][1])
        last[self.before :] = filters[-1][1]
        # No phrase lies entirely after the text: such a phrase sums to 0.
        last[self.behind :, 2 * each :] = last[self.beyond, each:] = -_VERY_LOW
        # A vocabulary word is written once: another thread may read its row from then on.
        self.is_written = bytearray(len(self.vocabulary))
        self.writing = Lock()


class WordContributions(Lexicon):
    """A lexicon that stores each new word's contribution in `tables`. A word without a vector has the
    mean of its n-grams'."""

    def __init__(self, tables: WordTables) -> None:
        super().__init__(tables)
        self.tables = tables
        self.kernel: Kernel | None = None  # which writes the same, from what a new word is made of:
        weights = tables.weights
        self._gram_weights, self._filters = weights.linear[BUCKETS:], weights.filters
        filters, biases = zip(*self._filters, strict=True)
        self.of_grams = (self._gram_weights, weights.grams, weights.vectors, *filters, *biases)

    def on_new_word(self, number: int, word: str) -> None:
        tables = self.tables
        if number >= len(self.vocabulary):
            self._write(number, word)
        elif not tables.is_written[number]:
            with tables.writing:
                if not tables.is_written[number]:
                    self._write(number, word)
                    tables.is_written[number] = 1

    def _write(self, number: int, word: str) -> None:
        tables, weights = self.tables, self.tables.weights
        if self.kernel is not None and word.isascii():
            hashed = self._hashes[number]
            tables.counts[number] = self.kernel.add_word(number, word.encode(), hashed)
            return
        hashes = gram_hashes(word)
        of_grams = self._gram_weights.take([each & BUCKET_MASK for each in hashes], axis=0)
        np.add.reduce(of_grams, axis=0, out=tables.rows[BUCKETS + number])
        tables.counts[number] = tables.count_array[number] = max(1, len(hashes))
        tables.hash_array[number] = self._hashes[number]
        vector = weights.vectors[number] if number < len(weights.vectors) else None
        if vector is None:
            rows = [each % GRAM_BUCKETS for each in hashes[:_GRAMS]]
            vector = np.add.reduce(weights.grams.take(rows, axis=0)) / max(1, len(rows))
        for table, (filters, biases) in zip(tables.phrases, self._filters, strict=True):
            np.add(vector.dot(filters), biases, out=table[number, : len(biases)])


def _filters(stored: Arrays, place: int) -> tuple[Floats, Floats]:
    """The weights of a vector as the word at `place` of three, and the biases (with the last word).

    Widest first: the first of three words belongs to one width, the second to two, the last to all.
    """
    columns, biases = [], []
    for each in reversed(WIDTHS[len(WIDTHS) - place - 1 :]):
        kernel, bias = unpack(stored, f"phrase{each}"), unpack(stored, f"phrase{each}_bias")
        word = place - (len(WIDTHS) - each)
        columns.append(kernel[:, word * len(bias) : (word + 1) * len(bias)])
        biases.append(bias if place == len(WIDTHS) - 1 else np.zeros_like(bias))
    return np.concatenate(columns, axis=1), np.concatenate(biases)
