"""The classifier that ships: a linear and a convolutional half in numpy, their logits averaged.

Weights come from an .npz that holds numbers and text alone (`allow_pickle=False`).
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moderation.categories import HEADS, PROMPT_ATTACK
from moderation.classifiers.features import (
    BUCKETS,
    GRAM_BUCKETS,
    Lexicon,
    gram_ids,
    in_word_grams,
    word_hash,
    words_of,
)

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[np.generic]]

WIDTHS = (1, 2, 3)
_GRAMS = 24
_LENGTH_OFFSET = 4
_MEAN_SCALE = 3
_NOT_HARMS = HEADS.index(PROMPT_ATTACK)
_HIGHEST = 80  # of an exponent: beyond it nothing changes
_LEAST = 1 / (1 + exp(_HIGHEST))
_MARKS = 3
_FAR = 1e9  # below any sum of a filter
_NOTHING = np.zeros((), np.float32)


def unpack(stored: Arrays, name: str) -> Floats:
    """Return an array as float32; whole-number arrays carry their scale beside them."""
    values = np.asarray(stored[name])
    floats: Floats = values.astype(np.float32)
    if values.dtype.kind == "i":
        floats = floats * np.asarray(stored[f"{name}_scale"], dtype=np.float32)
    return floats


class VectorLexicon(Lexicon):
    """A lexicon whose numbers also index word vectors; unknown words get their n-grams' mean.

    Behind a word's own numbers its vector has three marks, 0 for a word: whether a phrase that ends
    here may be one of a single word, of at most two words, and a constant 1, for the bias.
    """

    def __init__(self, stored: Arrays) -> None:
        words = bytes(np.asarray(stored["vocabulary"], dtype=np.uint8)).decode("utf-8").split("\n")
        self._gram_vectors = unpack(stored, "grams")
        known = unpack(stored, "vectors")
        super().__init__(words)
        self.width = known.shape[1]
        self.vectors = np.zeros((self.size + 3, self.width + _MARKS), dtype=np.float32)
        self.vectors[: len(known), : self.width] = known
        self.vectors[:, -1] = 1
        # The rows of no word at all: before a text, right behind it, and one farther.
        self.before, self.behind, self.beyond = self.size, self.size + 1, self.size + 2
        self.vectors[self.behind, self.width] = self.vectors[self.beyond, self.width] = 1
        self.vectors[self.beyond, self.width + 1] = 1
        self.gram_counts = [0] * self.size
        self.gram_sums = np.zeros((self.size, len(stored["linear_bias"])), dtype=np.float32)

    def added(self, number: int, word: str) -> None:
        self.gram_counts[number] = 0
        rows = [word_hash(gram) % GRAM_BUCKETS for gram in in_word_grams(word)[:_GRAMS]]
        mean = self._gram_vectors[rows].sum(0) / max(1, len(rows))
        self.vectors[number, : self.width] = mean


@lru_cache(maxsize=4096)
def _share(count: int, each: float) -> Floats:
    """So many equal shares: its product with rows is their sum, weighed."""
    return np.full(count, each, dtype=np.float32)


class Linear:
    """Logits of a text: words and pairs once each, and the in-word n-grams of each word.

    What a word's n-grams add is the same in every text, so it is summed once and kept.
    """

    def __init__(self, stored: Arrays, lexicon: VectorLexicon) -> None:
        self._weights = unpack(stored, "linear")
        self._bias = unpack(stored, "linear_bias")
        self._lexicon = lexicon

    def logits(self, numbers: list[int]) -> Floats:
        """One row of logits."""
        lexicon = self._lexicon
        if not numbers:
            return self._bias
        pairs, words = lexicon.pairs(numbers), set(numbers)
        counts = lexicon.gram_counts
        grams = sum([counts[word] or self._count(word) for word in words])
        rows = self._weights.take(pairs, axis=0)
        total: Floats = _share(len(pairs), len(pairs) ** -0.5).dot(rows)
        total += _share(len(words), grams**-0.5).dot(lexicon.gram_sums.take(list(words), axis=0))
        total += self._bias
        return total

    def _count(self, number: int) -> int:
        ids = gram_ids(self._lexicon.word(number))
        count = self._lexicon.gram_counts[number] = max(1, len(ids))
        self._lexicon.gram_sums[number] = self._weights[np.array(ids, int) + BUCKETS].sum(0)
        return count


class Convolution:
    """Logits of a text from word vectors: phrases of one to three words, largest and mean.

    A phrase is known by its last word, and may begin before the text and end behind it, as far as
    it touches it. Biases and edges are part of the matrices: each call of numpy costs a microsecond
    however little it does.
    """

    def __init__(self, stored: Arrays, lexicon: VectorLexicon) -> None:
        self._vectors = lexicon.vectors
        self._before = [lexicon.before] * (len(WIDTHS) - 1)
        self._behind = [lexicon.behind, lexicon.beyond]
        self._phrases = _phrases(stored, lexicon.width)
        filters = self._phrases.shape[1] // len(WIDTHS)
        order = _largest_first(filters)
        hidden, direct = (unpack(stored, name)[order] for name in ("hidden", "direct"))
        hidden_bias, direct_bias = unpack(stored, "hidden_bias"), unpack(stored, "direct_bias")
        out, out_bias = unpack(stored, "out"), unpack(stored, "out_bias")
        biases = np.concatenate([hidden_bias, direct_bias + out_bias])[None]
        self._first = np.concatenate([np.concatenate([hidden, direct], axis=1), biases])
        self._second = np.concatenate([out, np.eye(len(out_bias), dtype=np.float32)])
        # The hidden half passes where it is above 0, the direct one always.
        self._floor = np.full(self._second.shape[0], -np.inf, dtype=np.float32)
        self._floor[: len(hidden_bias)] = 0

    def logits(self, numbers: list[int]) -> Floats:
        """One row of logits."""
        padded = [*self._before, *(numbers or self._before[:1]), *self._behind]
        words, count = self._vectors.take(padded, axis=0), len(padded) - len(WIDTHS) + 1
        # Each row is three words side by side, the same memory read thrice.
        row = words.strides[0]
        sides = (count, len(self._phrases))
        triples: Floats = np.ndarray(sides, np.float32, words, 0, (row, words.itemsize))
        seen = triples.dot(self._phrases)
        np.maximum(seen, _NOTHING, out=seen)
        half = seen.shape[1]
        features = np.empty(2 * half + 1, np.float32)
        np.maximum.reduce(seen, axis=0, out=features[:half])
        mean = _MEAN_SCALE / (count - len(WIDTHS) + 1 + _LENGTH_OFFSET)
        _share(count, mean).dot(seen, out=features[half:-1])
        features[-1] = 1  # the biases' row
        first = features.dot(self._first)
        np.maximum(first, self._floor, out=first)
        result: Floats = first.dot(self._second)
        return result


def _phrases(stored: Arrays, width: int) -> Floats:
    """Columns are the filters of all widths; rows three words' vectors with their marks."""
    kernels = [unpack(stored, f"phrase{each}") for each in WIDTHS]
    filters, row = kernels[0].shape[1], width + _MARKS
    found: Floats = np.zeros((len(WIDTHS) * row, len(WIDTHS) * filters), dtype=np.float32)
    for place, (each, kernel) in enumerate(zip(WIDTHS, kernels, strict=True)):
        columns = slice(place * filters, (place + 1) * filters)
        for word in range(each):
            at = (len(WIDTHS) - each + word) * row
            found[at : at + width, columns] = kernel[:, word * filters : (word + 1) * filters]
        last = (len(WIDTHS) - 1) * row
        found[last + row - 1, columns] = unpack(stored, f"phrase{each}_bias")
        if each < len(WIDTHS):
            # No phrase that lies wholly behind the text: 0 is what such a one comes to.
            found[last + width + each - 1, columns] = -_FAR
    return found


def _largest_first(filters: int) -> list[int]:
    """The stored layers take each width's largest and mean side by side; ours all largest first."""
    blocks = [2 * place + half for half in (0, 1) for place in range(len(WIDTHS))]
    return [block * filters + each for block in blocks for each in range(filters)]


class Ensemble:
    """Both halves, Platt-calibrated by head; the highest harm is drawn toward the any-harm score."""

    def __init__(self, stored: Arrays, version: str) -> None:
        lexicon = VectorLexicon(stored)
        self.version = version
        self._lock = threading.Lock()
        self._lexicon = lexicon
        self._linear = Linear(stored, lexicon)
        self._convolution = Convolution(stored, lexicon)
        slopes, share = unpack(stored, "slopes"), unpack(stored, "share")[0]
        offsets = unpack(stored, "offsets")
        scales = (slopes * share).tolist(), (slopes * (1 - share)).tolist(), offsets.tolist()
        self._calibration = list(zip(*scales, strict=True))

    @classmethod
    def load(cls, path: Path) -> "Ensemble":
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with np.load(path, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
        return cls(stored, f"th-moderation-{digest[:12]}")

    def halves(self, texts: Sequence[str]) -> tuple[Floats, Floats]:
        """Return the uncalibrated logits of both halves: the heads and, last, any harm."""
        pairs = [self._halves(text) for text in texts]
        return np.array([linear for linear, _ in pairs]), np.array([curved for _, curved in pairs])

    def score(self, texts: Sequence[str]) -> Floats:
        """Return probabilities of shape (len(texts), len(HEADS))."""
        if not texts:
            return np.zeros((0, len(HEADS)), dtype=np.float32)
        return np.array([self._score(text) for text in texts], dtype=np.float32)

    def _halves(self, text: str) -> tuple[Floats, Floats]:
        with self._lock:
            # A text at a time: the lexicon numbers no more words at once, and on short texts a
            # batch saves less than its bookkeeping costs.
            (numbers,) = self._lexicon.numbers([words_of(text)])
            return self._linear.logits(numbers), self._convolution.logits(numbers)

    def _score(self, text: str) -> list[float]:
        # Plain numbers are quicker than arrays of eight.
        linear, curved = self._halves(text)
        logits = [
            first * one + second * other + offset
            for first, second, (one, other, offset) in zip(
                linear.tolist(), curved.tolist(), self._calibration, strict=True
            )
        ]
        return level([1 / (1 + exp(-x)) if x > -_HIGHEST else _LEAST for x in logits])


def level(chances: list[float]) -> list[float]:
    """Of the heads' chances and, last, any harm's: scale the harms so that the highest is the mean
    of itself and the any-harm score. Returns the heads'.

    The any-harm head ranks texts across categories better than the best single head does.
    """
    *heads, any_harm = chances
    attack = heads[_NOT_HARMS]
    heads[_NOT_HARMS] = 1e-6
    top = max(heads)
    scale = (top + any_harm) / (2 * top)
    levelled = [1.0 if (scaled := each * scale) > 1 else scaled for each in heads]
    levelled[_NOT_HARMS] = attack
    return levelled
