"""The classifier that ships: a linear and a convolutional half, their logits averaged.

Both are computed by the extension of `kernel.c` where it was built, else by numpy. Weights come from
an .npz with only numbers and text (`allow_pickle=False`).
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from math import exp
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from moderation.categories import HEADS, PROMPT_ATTACK
from moderation.classifiers.compiled import Kernel
from moderation.classifiers.cuts import Cuts, Piece, read_pieces, runs
from moderation.classifiers.features import BUCKETS
from moderation.classifiers.windows import CompiledWindow, WindowWords
from moderation.classifiers.word_contributions import (
    WIDTHS,
    Arrays,
    Floats,
    Weights,
    WordContributions,
    WordTables,
    unpack,
)

Integers = NDArray[np.int64]

_LENGTH_OFFSET = 4
_MEAN_SCALE = 3
_NOT_HARMS = HEADS.index(PROMPT_ATTACK)
_MAX_EXPONENT = 80  # limit of an exponent: beyond it the result does not change
_LEAST = 1 / (1 + exp(_MAX_EXPONENT))
_NOTHING = np.zeros((), np.float32)
_IN_TABLES = frozenset({"vocabulary", "linear", "linear_scale", "grams", "vectors"})
_HEADS = Struct(f"{len(HEADS)}f")


@lru_cache(maxsize=4096)
def _share(count: int, each: float) -> Floats:
    """`count` entries of `each`: its product with rows is their weighted sum."""
    return np.full(count, each, dtype=np.float32)


class Linear:
    """Logits of a text: words and pairs once each, and the in-word n-grams of each word."""

    def __init__(self, bias: Floats, words: WordContributions) -> None:
        self.bias = bias
        self._words = words

    def logits(self, numbers: list[int], out: Floats) -> None:
        """Write one row of logits, without the bias."""
        if not numbers:
            out.fill(0)
            return
        pairs, words = self._words.pairs(numbers), set(numbers)
        grams = sum(map(self._words.tables.counts.__getitem__, words))
        rows = self._words.tables.rows.take([*pairs, *[BUCKETS + word for word in words]], axis=0)
        shares = np.empty(len(rows), np.float32)
        shares[: len(pairs)] = len(pairs) ** -0.5
        shares[len(pairs) :] = grams**-0.5
        shares.dot(rows, out=out)


class Convolution:
    """The convolutional half: filters of one to three words, pooled by maximum and mean.

    A phrase is identified by its last word and may begin before or end after the text. Filter
    values are sums of the contributions of words. Biases and edges are part of the matrices,
    because each numpy call costs at least a microsecond.
    """

    def __init__(self, stored: Arrays, words: WordContributions) -> None:
        self._words = words
        order = _largest_first(stored["phrase1"].shape[1])
        hidden, direct = (unpack(stored, name)[order] for name in ("hidden", "direct"))
        hidden_bias, direct_bias = unpack(stored, "hidden_bias"), unpack(stored, "direct_bias")
        out, out_bias = unpack(stored, "out"), unpack(stored, "out_bias")
        biases = np.concatenate([hidden_bias, direct_bias + out_bias])[None]
        self.matrix = np.concatenate([np.concatenate([hidden, direct], axis=1), biases])
        # Contributions of the hidden features and of the direct ones to the logits.
        self.shares = np.concatenate([out, np.eye(len(out_bias), dtype=np.float32)])
        # Hidden features pass a ReLU, direct ones are unchanged.
        self.floor = np.full(len(self.shares), -np.inf, dtype=np.float32)
        self.floor[: len(hidden_bias)] = 0

    def phrases(self, padded: Integers) -> Floats:
        """The filter values of every three adjacent words, indexed by the last of them."""
        first, second, last = self._words.tables.phrases
        phrases_seen = last.take(padded[2:], axis=0)
        phrases_seen += second.take(padded[1:-1], axis=0)
        phrases_seen += first.take(padded[:-2], axis=0)
        np.maximum(phrases_seen, _NOTHING, out=phrases_seen)
        return phrases_seen

    def hidden(self, phrases_seen: Floats, out: Floats) -> None:
        """Write a text's feature row, whose product with `shares` is its logits."""
        count, half = phrases_seen.shape
        features = np.empty(2 * half + 1, np.float32)
        np.maximum.reduce(phrases_seen, axis=0, out=features[:half])
        mean = _MEAN_SCALE / (count - len(WIDTHS) + 1 + _LENGTH_OFFSET)
        _share(count, mean).dot(phrases_seen, out=features[half:-1])
        features[-1] = 1  # the biases' row
        features.dot(self.matrix, out=out)
        np.maximum(out, self.floor, out=out)


def _largest_first(filters: int) -> list[int]:
    """The order of features. Stored layers have maximum and mean of each width together, narrowest
    first; here all maxima come first, widest first."""
    blocks = [2 * place + half for half in (0, 1) for place in reversed(range(len(WIDTHS)))]
    return [block * filters + each for block in blocks for each in range(filters)]


class Ensemble:
    """Both halves, Platt-calibrated per head; the highest harm is averaged with the any-harm score.

    Safe for threads, and no thread waits for another: each call borrows a `Scorer` of its own.
    There are as many as calls ever ran at the same time.
    """

    def __init__(
        self, stored: Arrays, version: str, *, compiled: bool = Kernel is not None
    ) -> None:
        self.version = version
        self._compiled = compiled
        self._stored = {name: stored[name] for name in stored if name not in _IN_TABLES}
        self._tables = WordTables(Weights(stored))
        self._first = self._new_scorer()  # with the largest cache, so it is used where it is free
        self._free: deque[Scorer] = deque([self._first])
        self._window_words: WindowWords | None = None

    @classmethod
    def load(cls, path: Path, *, compiled: bool = Kernel is not None) -> "Ensemble":
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with np.load(path, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
        return cls(stored, f"th-moderation-{digest[:12]}", compiled=compiled)

    def _new_scorer(self) -> "Scorer":
        try:
            words = WordContributions(self._tables)
        except IndexError:  # more calls at once than the tables have ranges for
            words = WordContributions(WordTables(self._tables.weights))
        return Scorer(self._stored, words, self._compiled)

    def _borrowed(self) -> "Scorer":
        """To be given back after its use."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new_scorer()

    def _give_back(self, scorer: "Scorer") -> None:
        if scorer is self._first:
            self._free.append(scorer)
        else:
            self._free.appendleft(scorer)

    def running_window(self, reach: int, limits: Sequence[float]) -> CompiledWindow | None:
        """None where the classifier is not compiled."""
        if self._window_words is None:
            self._window_words = self._new_scorer().window_words()
        words = self._window_words
        return None if words is None else CompiledWindow(words, reach, tuple(limits))

    def halves(self, texts: Sequence[str]) -> tuple[Floats, Floats]:
        """Return the uncalibrated logits of both halves: the heads, then any harm."""
        scorer = self._borrowed()
        try:
            return scorer.halves(texts)
        finally:
            self._give_back(scorer)

    def score(self, texts: Sequence[str]) -> Floats:
        """Return probabilities of shape (len(texts), len(HEADS))."""
        if not texts:
            return np.zeros((0, len(HEADS)), dtype=np.float32)
        scorer = self._borrowed()
        try:
            return np.array([scorer.score_text(text) for text in texts], dtype=np.float32)
        finally:
            self._give_back(scorer)

    def score_cuts(self, text: str, cuts: Cuts) -> list[list[float]]:
        """Return the probabilities of pieces of a text, identical to those of `score`."""
        scorer = self._borrowed()
        try:
            return scorer.score_cuts(text, cuts)
        finally:
            self._give_back(scorer)


class Scorer:
    """The caches and buffers of one call at a time. Not thread-safe."""

    def __init__(self, stored: Arrays, words: WordContributions, compiled: bool) -> None:
        self._words, tables = words, words.tables
        self._before = [tables.before] * (len(WIDTHS) - 1)
        self._behind = [tables.behind, tables.beyond]
        self._linear = Linear(unpack(stored, "linear_bias"), self._words)
        self._convolution = Convolution(stored, self._words)
        slopes, share = unpack(stored, "slopes"), unpack(stored, "share")[0]
        # From the concatenated logits of both halves to calibrated logits.
        curved, offsets = self._convolution.shares, unpack(stored, "offsets")
        straight = np.diag(slopes * share)
        self._calibration = np.concatenate([curved * (slopes * (1 - share)), straight])
        self._offsets = offsets + self._linear.bias.dot(straight)
        self._said = np.empty(len(self._calibration), np.float32)
        self._curved, self._straight = self._said[: len(curved)], self._said[len(curved) :]
        self._kernel: Kernel | None = None
        if compiled:
            of_words = (tables.rows, tables.hash_array, tables.count_array, *tables.phrases)
            layer = self._convolution.matrix, self._convolution.floor
            padding = tables.before, tables.behind, tables.beyond
            arrays = (*of_words, *layer, self._calibration, self._offsets, *words.of_grams)
            self._kernel = words.kernel = Kernel(arrays, BUCKETS, padding)

    def window_words(self) -> WindowWords | None:
        """Gives its words to running windows, for which alone they are from then on."""
        return None if self._kernel is None else WindowWords(self._words, self._kernel)

    def halves(self, texts: Sequence[str]) -> tuple[Floats, Floats]:
        """Return the uncalibrated logits of both halves: the heads, then any harm."""
        linear, curved = [], []
        for numbers in map(self._words.read, texts):
            self._numpy_logits(numbers, self._phrases(numbers))
            linear.append(self._straight + self._linear.bias)
            curved.append(self._curved.dot(self._convolution.shares))
        return np.array(linear), np.array(curved)

    def score_cuts(self, text: str, cuts: Cuts) -> list[list[float]]:
        """Return the probabilities of pieces of a text, identical to those of `score`."""
        if len(cuts) == 1:
            start, end = cuts[0]
            return [self.score_text(text[start:end])]
        rows: list[list[float]] = []
        for run in runs(cuts):
            if len(run) == 1:
                rows.append(self.score_text(text[slice(*run[0])]))
                continue
            begin, end = run[0][0], max(end for _, end in run)
            near = [(start - begin, stop - begin) for start, stop in run]
            rows += self._score_run(*read_pieces(text[begin:end], near))
        return rows

    def score_text(self, text: str) -> list[float]:
        numbers = self._words.read(text)
        if self._kernel is not None:
            return self._kernel.scores(numbers)
        return _probabilities(self._numpy_logits(numbers, self._phrases(numbers)))

    def _phrases(self, numbers: list[int]) -> Floats:
        return self._convolution.phrases(np.array(self._pad(numbers)))

    def _pad(self, numbers: list[int]) -> list[int]:
        return [*self._before, *(numbers or self._before[:1]), *self._behind]

    def _numpy_logits(self, numbers: list[int], phrases_seen: Floats) -> list[float]:
        self._linear.logits(numbers, self._straight)
        self._convolution.hidden(phrases_seen, self._curved)
        logits = self._said.dot(self._calibration)
        logits += self._offsets
        return list(logits.tolist())

    def _score_run(self, words: Sequence[str], pieces: Sequence[Piece]) -> list[list[float]]:
        own = [word for piece in pieces for word in (*piece.head, *piece.tail)]
        numbers = self._words.numbers([*words, *own])
        text, at, texts = numbers[: len(words)], len(words), []
        for piece in pieces:
            middle, end = at + len(piece.head), at + len(piece.head) + len(piece.tail)
            inner = text[piece.first : piece.last]
            texts.append([*numbers[at:middle], *inner, *numbers[middle:end]])
            at = end
        if self._kernel is not None:
            return [self._kernel.scores(each) for each in texts]
        found = zip(texts, self._phrases_of(text, pieces, texts), strict=True)
        return [_probabilities(self._numpy_logits(*each)) for each in found]

    def _phrases_of(
        self, text: list[int], pieces: Sequence[Piece], texts: Sequence[list[int]]
    ) -> list[Floats]:
        """The phrases of each piece: those of the text, except at the piece's ends."""
        reach = len(WIDTHS) - 1
        asked, parts = [*self._before, *text], []
        for piece, numbers in zip(pieces, texts, strict=True):
            padded = self._pad(numbers)
            ends = [padded]
            if piece.last - piece.first >= 2 * reach:
                ends = [
                    padded[: len(piece.head) + 2 * reach],
                    padded[-len(piece.tail) - 2 * reach :],
                ]
            places = []
            for each in ends:
                places.append((len(asked), len(asked) + len(each) - reach))
                asked += each
            if len(ends) > 1:
                places.insert(1, (piece.first + reach, piece.last))
            parts.append(places)
        rows = self._convolution.phrases(np.array(asked))
        return [np.concatenate([rows[start:end] for start, end in each]) for each in parts]


def _probabilities(logits: list[float]) -> list[float]:
    chances = [1 / (1 + exp(-x)) if x > -_MAX_EXPONENT else _LEAST for x in logits]
    return _rounded(blend_any_harm(chances))


def _rounded(row: list[float]) -> list[float]:
    """Round to float32, so that equal texts have equal scores on every code path."""
    return list(_HEADS.unpack(_HEADS.pack(*row)))


def blend_any_harm(chances: list[float]) -> list[float]:
    """Scale the harm probabilities so that the highest becomes the mean of itself and the any-harm
    score, which is the last of `chances`. Returns those of the heads.

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
