"""The classifier that ships: a linear and a convolutional half in numpy, their logits averaged.

Weights come from an .npz that holds numbers and text alone (`allow_pickle=False`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moderation.categories import HEADS, PROMPT_ATTACK
from moderation.classifiers.features import (
    BUCKETS,
    GRAM_BUCKETS,
    FeatureTable,
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
_MOST_CACHED = 60_000
_HARMS = [place for place, head in enumerate(HEADS) if head != PROMPT_ATTACK]


def unpack(stored: Arrays, name: str) -> Floats:
    """Return an array as float32; whole-number arrays carry their scale beside them."""
    values = np.asarray(stored[name])
    floats: Floats = values.astype(np.float32)
    if values.dtype.kind == "i":
        floats = floats * np.asarray(stored[f"{name}_scale"], dtype=np.float32)
    return floats


class Linear:
    """Logits from hashed features: shape (heads + any,)."""

    def __init__(self, stored: Arrays) -> None:
        self._weights = unpack(stored, "linear")
        self._bias = unpack(stored, "linear_bias")
        self._table = FeatureTable()

    def logits(self, words: Sequence[str]) -> Floats:
        pairs, grams = self._table.ids(words)
        total: Floats = self._bias
        if len(pairs):
            total = total + self._weights[pairs].sum(0) / np.float32(np.sqrt(len(pairs)))
        if len(grams):
            total = total + self._weights[grams + BUCKETS].sum(0) / np.float32(np.sqrt(len(grams)))
        return np.asarray(total, dtype=np.float32)


class Convolution:
    """Logits from word vectors: phrases of one to three words, largest and mean, then two layers."""

    def __init__(self, stored: Arrays) -> None:
        self._vectors = unpack(stored, "vectors")
        self._grams = unpack(stored, "grams")
        vocabulary = bytes(stored["vocabulary"].astype(np.uint8)).decode("utf-8").split("\n")
        self._rows: dict[str, Floats] = {
            word: self._vectors[row] for row, word in enumerate(vocabulary)
        }
        self._known = len(self._rows)
        self._phrases = [
            (width, unpack(stored, f"phrase{width}"), unpack(stored, f"phrase{width}_bias"))
            for width in WIDTHS
        ]
        self._all = np.concatenate([kernel for _, kernel, _ in self._phrases], axis=1)
        self._filters = len(self._phrases[0][2])
        self._layers = {
            name: (unpack(stored, name), unpack(stored, f"{name}_bias"))
            for name in ("hidden", "out", "direct")
        }

    def _vector(self, word: str) -> Floats:
        found = self._rows.get(word)
        if found is None:
            rows = [word_hash(gram) % GRAM_BUCKETS for gram in in_word_grams(word)[:_GRAMS]]
            found = np.asarray(self._grams[rows].sum(0) / max(1, len(rows)), dtype=np.float32)
            if len(self._rows) < self._known + _MOST_CACHED:
                self._rows[word] = found
        return found

    def logits(self, words: Sequence[str]) -> Floats:
        count = max(1, len(words))
        vectors = np.zeros((count + 4, self._all.shape[0]), dtype=np.float32)
        if words:
            vectors[2 : count + 2] = [self._vector(word) for word in words]
        products = vectors @ self._all
        pooled, column = [], 0
        for width, _, bias in self._phrases:
            # As if padded by width - 1 on both sides.
            places = count + width - 1
            first = 2 - (width - 1)
            seen = products[first : first + places, column : column + self._filters] + bias
            for shift in range(1, width):
                at = column + shift * self._filters
                seen += products[first + shift : first + shift + places, at : at + self._filters]
            np.maximum(seen, 0, out=seen)
            pooled += [
                seen.max(0),
                seen.sum(0) * np.float32(_MEAN_SCALE / (count + _LENGTH_OFFSET)),
            ]
            column += width * self._filters
        features = np.concatenate(pooled)
        (hidden, hidden_bias), (out, out_bias), (direct, direct_bias) = (
            self._layers[name] for name in ("hidden", "out", "direct")
        )
        middle = np.maximum(features @ hidden + hidden_bias, 0)
        result: Floats = middle @ out + out_bias + features @ direct + direct_bias
        return result


@dataclass(frozen=True)
class Ensemble:
    """Both halves, Platt-calibrated by head; the highest harm is drawn toward the any-harm score."""

    version: str
    linear: Linear
    convolution: Convolution
    slopes: Floats
    offsets: Floats
    share: float

    @classmethod
    def load(cls, path: Path) -> "Ensemble":
        content = path.read_bytes()
        with np.load(path, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
        return cls.of(stored, "th-moderation-" + hashlib.sha256(content).hexdigest()[:12])

    @classmethod
    def of(cls, stored: Arrays, version: str) -> "Ensemble":
        return cls(
            version,
            Linear(stored),
            Convolution(stored),
            unpack(stored, "slopes"),
            unpack(stored, "offsets"),
            float(unpack(stored, "share")[0]),
        )

    def logits(self, text: str) -> Floats:
        """Return the uncalibrated logits of the heads and, last, of any harm."""
        words = words_of(text)
        mine = np.float32(self.share)
        return mine * self.linear.logits(words) + (1 - mine) * self.convolution.logits(words)

    def score(self, texts: Sequence[str]) -> Floats:
        """Return probabilities of shape (len(texts), len(HEADS))."""
        if not texts:
            return np.zeros((0, len(HEADS)), dtype=np.float32)
        logits = np.stack([self.logits(text) for text in texts]) * self.slopes + self.offsets
        chances = 1 / (1 + np.exp(-np.clip(logits, -30, 30)))
        return level(chances)


def level(chances: Floats) -> Floats:
    """Scale the harms so that the highest is the mean of itself and the any-harm score.

    The any-harm head ranks texts across categories better than the best single head does.
    """
    heads = chances[:, :-1].copy()
    top = np.maximum(heads[:, _HARMS].max(1), np.float32(1e-6))
    wanted = (top + chances[:, -1]) / 2
    heads[:, _HARMS] *= (wanted / top)[:, None]
    return np.clip(heads, 0, 1)
