"""The classifier that ships: a linear and a convolutional half in numpy, their logits averaged.

Weights come from an .npz that holds numbers and text alone (`allow_pickle=False`).
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
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
Places = NDArray[np.int64]
Arrays = Mapping[str, NDArray[np.generic]]

WIDTHS = (1, 2, 3)
# Blank rows between two texts, so that no phrase spans both.
_GAP = 2
_GRAMS = 24
_BATCH_WORDS = 4_000
_LENGTH_OFFSET = 4
_MEAN_SCALE = 3
_HARMS = [place for place, head in enumerate(HEADS) if head != PROMPT_ATTACK]


def unpack(stored: Arrays, name: str) -> Floats:
    """Return an array as float32; whole-number arrays carry their scale beside them."""
    values = np.asarray(stored[name])
    floats: Floats = values.astype(np.float32)
    if values.dtype.kind == "i":
        floats = floats * np.asarray(stored[f"{name}_scale"], dtype=np.float32)
    return floats


class VectorLexicon(Lexicon):
    """A lexicon whose numbers also index word vectors; unknown words get their n-grams' mean."""

    def __init__(self, stored: Arrays) -> None:
        words = bytes(np.asarray(stored["vocabulary"], dtype=np.uint8)).decode("utf-8").split("\n")
        self._gram_vectors = unpack(stored, "grams")
        known = unpack(stored, "vectors")
        super().__init__(words)
        self.vectors = np.zeros((self.size, known.shape[1]), dtype=np.float32)
        self.vectors[: len(known)] = known
        self.gram_counts = np.zeros(self.size, dtype=np.int64)
        self.gram_sums = np.zeros((self.size, len(stored["linear_bias"])), dtype=np.float32)

    def added(self, number: int, word: str) -> None:
        self.gram_counts[number] = 0
        rows = [word_hash(gram) % GRAM_BUCKETS for gram in in_word_grams(word)[:_GRAMS]]
        self.vectors[number] = self._gram_vectors[rows].sum(0) / max(1, len(rows))


class Linear:
    """Logits of many texts: words and pairs once each, and the in-word n-grams of each word.

    What a word's n-grams add is the same in every text, so it is summed once and kept.
    """

    def __init__(self, stored: Arrays, lexicon: VectorLexicon) -> None:
        self._weights = unpack(stored, "linear")
        self._bias = unpack(stored, "linear_bias")
        self._lexicon = lexicon

    def logits(self, texts: Sequence[list[int]]) -> Floats:
        lexicon = self._lexicon
        total = np.repeat(self._bias[None, :], len(texts), axis=0)
        for place, numbers in enumerate(texts):
            if not numbers:
                continue
            pairs = lexicon.pairs(numbers)
            total[place] += self._weights.take(pairs, axis=0).sum(0) * len(pairs) ** -0.5
            words = np.fromiter(set(numbers), dtype=np.int64)
            counts = lexicon.gram_counts.take(words)
            if not counts.all():
                counts = self._count(words)
            grams = lexicon.gram_sums.take(words, axis=0).sum(0)
            total[place] += grams * float(counts.sum()) ** -0.5
        return total

    def _count(self, words: Places) -> Places:
        for number in words[self._lexicon.gram_counts[words] == 0].tolist():
            ids = gram_ids(self._lexicon.word(number))
            self._lexicon.gram_counts[number] = max(1, len(ids))
            self._lexicon.gram_sums[number] = self._weights[np.array(ids, int) + BUCKETS].sum(0)
        return self._lexicon.gram_counts.take(words)


class Convolution:
    """Logits of many texts from word vectors: phrases of one to three words, largest and mean."""

    def __init__(self, stored: Arrays, lexicon: VectorLexicon) -> None:
        self._lexicon = lexicon
        kernels = [unpack(stored, f"phrase{width}") for width in WIDTHS]
        self._biases = [unpack(stored, f"phrase{width}_bias") for width in WIDTHS]
        self._all = np.concatenate(kernels, axis=1)
        self._filters = len(self._biases[0])
        self._layers = {
            name: (unpack(stored, name), unpack(stored, f"{name}_bias"))
            for name in ("hidden", "out", "direct")
        }

    def logits(self, texts: Sequence[list[int]]) -> Floats:
        counts = np.array([max(1, len(numbers)) for numbers in texts])
        starts = _GAP + np.concatenate([[0], np.cumsum(counts + _GAP)[:-1]])
        rows = np.zeros((int(starts[-1] + counts[-1]) + _GAP + 1, self._all.shape[0]), np.float32)
        for start, numbers in zip(starts.tolist(), texts, strict=True):
            if numbers:
                rows[start : start + len(numbers)] = self._lexicon.vectors.take(numbers, axis=0)
        features = self._pooled(rows @ self._all, starts, counts)
        (hidden, hidden_bias), (out, out_bias), (direct, direct_bias) = (
            self._layers[name] for name in ("hidden", "out", "direct")
        )
        middle = np.maximum(features @ hidden + hidden_bias, 0)
        result: Floats = middle @ out + out_bias + features @ direct + direct_bias
        return result

    def _pooled(self, products: Floats, starts: Places, counts: Places) -> Floats:
        pooled, column = [], 0
        mean = (_MEAN_SCALE / (counts + _LENGTH_OFFSET)).astype(np.float32)[:, None]
        for width, bias in zip(WIDTHS, self._biases, strict=True):
            # A phrase may begin width - 1 places before the text and end as far behind it.
            places = len(products) - width + 1
            seen = products[:places, column : column + self._filters] + bias
            for shift in range(1, width):
                at = column + shift * self._filters
                seen += products[shift : shift + places, at : at + self._filters]
            np.maximum(seen, 0, out=seen)
            edges = np.stack([starts - (width - 1), starts + counts], axis=1).ravel()
            pooled.append(np.maximum.reduceat(seen, edges, axis=0)[::2])
            pooled.append(np.add.reduceat(seen, edges, axis=0)[::2] * mean)
            column += width * self._filters
        return np.concatenate(pooled, axis=1)


class Ensemble:
    """Both halves, Platt-calibrated by head; the highest harm is drawn toward the any-harm score."""

    def __init__(self, stored: Arrays, version: str) -> None:
        lexicon = VectorLexicon(stored)
        self.version = version
        self._lock = threading.Lock()
        self._lexicon = lexicon
        self._linear = Linear(stored, lexicon)
        self._convolution = Convolution(stored, lexicon)
        self._slopes = unpack(stored, "slopes")
        self._offsets = unpack(stored, "offsets")
        self._share = unpack(stored, "share")[0]

    @classmethod
    def load(cls, path: Path) -> "Ensemble":
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with np.load(path, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
        return cls(stored, f"th-moderation-{digest[:12]}")

    def halves(self, texts: Sequence[str]) -> tuple[Floats, Floats]:
        """Return the uncalibrated logits of both halves: the heads and, last, any harm."""
        linear, curved = [], []
        with self._lock:
            for batch in _batches([words_of(text) for text in texts]):
                numbered = self._lexicon.numbers(batch)
                linear.append(self._linear.logits(numbered))
                curved.append(self._convolution.logits(numbered))
        return np.concatenate(linear), np.concatenate(curved)

    def score(self, texts: Sequence[str]) -> Floats:
        """Return probabilities of shape (len(texts), len(HEADS))."""
        if not texts:
            return np.zeros((0, len(HEADS)), dtype=np.float32)
        linear, curved = self.halves(texts)
        logits = (self._share * linear + (1 - self._share) * curved) * self._slopes + self._offsets
        return level(1 / (1 + np.exp(-np.clip(logits, -30, 30))))


def _batches(texts: list[list[str]]) -> Iterator[list[list[str]]]:
    """Cut into batches that the lexicon can number and that stay in the processor's cache."""
    batch: list[list[str]] = []
    words = 0
    for text in texts:
        if batch and words + len(text) > _BATCH_WORDS:
            yield batch
            batch, words = [], 0
        batch.append(text)
        words += len(text)
    yield batch


def level(chances: Floats) -> Floats:
    """Scale the harms so that the highest is the mean of itself and the any-harm score.

    The any-harm head ranks texts across categories better than the best single head does.
    """
    heads = chances[:, :-1].copy()
    top = np.maximum(heads[:, _HARMS].max(1), np.float32(1e-6))
    wanted = (top + chances[:, -1]) / 2
    heads[:, _HARMS] *= (wanted / top)[:, None]
    return np.clip(heads, 0, 1)
