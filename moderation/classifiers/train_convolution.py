"""Fits the convolutional half: word vectors with sub-words, phrases of one to three words, pooled."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from moderation.classifiers.features import GRAM_BUCKETS, in_word_grams, word_hash, words_of
from moderation.classifiers.train_sources import ANY, Example

DIMENSIONS, FILTERS, HIDDEN = 32, 48, 48
WIDTHS = (1, 2, 3)
_BATCH = 128
_LONGEST = 200
_GRAMS = 24
_VOCABULARY = 22_000
# About the norm of a random vector, and a smaller initial contribution of sub-words.
_START_LENGTH = 1.7
_GRAMS_BEGIN = 0.3


@dataclass
class Vocabulary:
    """Words of the training text; row 0 is padding and row 1 any unknown word."""

    words: list[str]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Vocabulary":
        # In the order of the text, because a set's order differs between runs.
        counts = Counter(word for text in texts for word in dict.fromkeys(words_of(text)))
        return cls([word for word, n in counts.most_common(_VOCABULARY) if n >= 3])

    def tables(self, texts: Sequence[str]) -> tuple[dict[str, int], Tensor, Tensor]:
        """Return ids of all words in `texts`, each id's vocabulary row, and its n-gram rows."""
        rows = {word: row + 2 for row, word in enumerate(self.words)}
        every = sorted({word for text in texts for word in words_of(text)} | set(self.words))
        ids = {word: number + 1 for number, word in enumerate(every)}
        row_of = torch.zeros(len(every) + 1, dtype=torch.long)
        grams = torch.zeros((len(every) + 1, _GRAMS), dtype=torch.long)
        for word, number in ids.items():
            row_of[number] = rows.get(word, 1)
            for place, row in enumerate(gram_rows(word)):
                grams[number, place] = row
        return ids, row_of, grams


def gram_rows(word: str) -> list[int]:
    return [word_hash(g) % GRAM_BUCKETS + 1 for g in in_word_grams(word)[:_GRAMS]]


class Network(nn.Module):
    def __init__(self, words: int, heads: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words + 2, DIMENSIONS)
        self.gram = nn.Embedding(GRAM_BUCKETS + 1, DIMENSIONS)
        for table, blank in ((self.word, 2), (self.gram, 1)):
            nn.init.normal_(table.weight, 0, 0.3)
            table.weight.data[:blank] = 0
        self.phrases = nn.ModuleList(
            nn.Conv1d(DIMENSIONS, FILTERS, width, padding=width - 1) for width in WIDTHS
        )
        pooled = 2 * FILTERS * len(WIDTHS)
        self.hidden = nn.Linear(pooled, HIDDEN)
        self.out = nn.Linear(HIDDEN, heads)
        self.direct = nn.Linear(pooled, heads)

    def begin_with(self, words: Sequence[str], start: Mapping[str, NDArray[np.float32]]) -> None:
        """Replace random vectors by the given vectors of norm one."""
        known = [(row, start[word]) for row, word in enumerate(words, 2) if word in start]
        with torch.no_grad():
            for row, vector in known:
                self.word.weight[row] = torch.from_numpy(vector) * _START_LENGTH
            self.gram.weight.mul_(_GRAMS_BEGIN)

    def vectors(self, ids: Tensor, row_of: Tensor, grams: Tensor, forget: float) -> Tensor:
        """A word's vector plus the mean of its n-grams'; training drops some words at random."""
        distinct, where = torch.unique(ids, return_inverse=True)
        rows = row_of[distinct].clone()
        rows[torch.rand(len(rows)) < forget] = 1
        pieces = grams[distinct]
        count = (pieces > 0).sum(1, keepdim=True).clamp(min=1)
        sub = (self.gram(pieces) * (pieces > 0).unsqueeze(2)).sum(1) / count
        whole = self.word(rows) * (rows > 1).unsqueeze(1)
        found: Tensor = ((whole + sub) * (distinct > 0).unsqueeze(1))[where]
        return found

    def forward(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        pooled = []
        for phrase in self.phrases:
            seen = functional.relu(phrase(vectors.transpose(1, 2)))
            pooled += [seen.max(2).values, 3 * seen.sum(2) / (lengths + 4).unsqueeze(1)]
        features = functional.dropout(torch.cat(pooled, 1), 0.4, self.training)
        out: Tensor = self.out(functional.relu(self.hidden(features))) + self.direct(features)
        return out


@dataclass
class Fitted:
    network: Network
    vocabulary: Vocabulary


def fit(
    examples: list[Example],
    heads: Sequence[str],
    epochs: int,
    seed: int,
    start: Mapping[str, NDArray[np.float32]],
) -> Fitted:
    """Train with Adam from the vectors of `start`; a missing label adds nothing to the loss."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    chance = np.random.default_rng(seed)
    texts = [example.text for example in examples]
    vocabulary = Vocabulary.of(texts)
    ids, row_of, grams = vocabulary.tables(texts)
    numbered = [np.array([ids[w] for w in words_of(text)] or [0]) for text in texts]
    labels = np.array([[e.labels.get(h, np.nan) for h in heads] for e in examples], np.float32)
    weights = np.array([example.weight for example in examples], np.float32)
    calm = [i for i, e in enumerate(examples) if e.labels.get(ANY) == 0.0 and len(numbered[i]) < 90]
    network = Network(len(vocabulary.words), len(heads))
    network.begin_with(vocabulary.words, start)
    optimiser = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=1e-4)
    total = epochs * sum(1 for _ in _batches(weights, numbered, np.random.default_rng(0)))
    # The number of batches varies a little from epoch to epoch.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, 4e-3, total_steps=int(total * 1.1) + 10, pct_start=0.15
    )
    for epoch in range(epochs):
        losses = []
        for batch in _batches(weights, numbered, chance):
            rows = [_row(numbered, i, calm, labels[i], chance) for i in batch]
            vectors = network.vectors(_padded(rows), row_of, grams, forget=0.25)
            vectors = functional.dropout(vectors, 0.2)
            logits = network(vectors, torch.tensor([float(len(row)) for row in rows]))
            loss = _loss(logits, labels[batch], weights[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 2.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        print(f"  convolution: epoch {epoch + 1}, loss {np.mean(losses):.4f}", flush=True)
    return Fitted(network.eval(), vocabulary)


def _batches(
    weights: NDArray[np.float32], rows: list[NDArray[np.int64]], chance: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Examples of low weight are sampled less often instead of weighted, which saves time."""
    drawn = np.flatnonzero(chance.random(len(weights)) < np.clip(weights, 0.2, 1))
    order = chance.permutation(drawn)
    for start in range(0, len(order), _BATCH * 50):
        part = order[start : start + _BATCH * 50]
        part = part[np.argsort([min(len(rows[i]), _LONGEST) for i in part], kind="stable")]
        batches = [part[i : i + _BATCH] for i in range(0, len(part), _BATCH)]
        yield from (batches[i] for i in chance.permutation(len(batches)))


def _row(
    rows: list[NDArray[np.int64]],
    index: int,
    calm: list[int],
    labels: NDArray[np.float32],
    chance: np.random.Generator,
) -> NDArray[np.int64]:
    """A text, sometimes with a harmless one before or after it; long harmless ones are cropped."""
    row = rows[index]
    if calm and len(row) < 90 and chance.random() < 0.2:
        other = rows[calm[chance.integers(len(calm))]]
        row = np.concatenate([other, row] if chance.random() < 0.5 else [row, other])
    if len(row) > _LONGEST:
        harmless = labels[-1] == 0
        start = chance.integers(0, len(row) - _LONGEST + 1) if harmless else 0
        row = row[start : start + _LONGEST]
    return row


def _padded(rows: list[NDArray[np.int64]]) -> Tensor:
    longest = max(len(row) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return torch.from_numpy(ids)


def _loss(logits: Tensor, labels: NDArray[np.float32], weights: NDArray[np.float32]) -> Tensor:
    known = torch.from_numpy(~np.isnan(labels)).float()
    wanted = torch.from_numpy(np.nan_to_num(labels))
    each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    # The rest of a low weight is the rate at which the example is sampled.
    scale = torch.from_numpy(np.minimum(weights / 0.2, 1.0)).unsqueeze(1)
    return (each * known * scale).sum() / len(labels) / 4


def arrays(fitted: Fitted) -> dict[str, NDArray[np.float32]]:
    """Return the weights as arrays: a final vector per word, n-grams for all other words."""
    network = fitted.network
    words = fitted.vocabulary.words
    ids, row_of, grams = Vocabulary(words).tables([])
    order = torch.tensor([ids[word] for word in words])
    with torch.no_grad():
        vectors = network.vectors(order, row_of, grams, forget=0.0)
    found = {"vectors": vectors.numpy(), "grams": network.gram.weight.detach().numpy()[1:]}
    for width, phrase in zip(WIDTHS, network.phrases, strict=True):
        # (filters, dimensions, width) to (dimensions, width * filters): one product a text.
        kernel = phrase.weight.detach().numpy()  # type: ignore[operator]
        found[f"phrase{width}"] = kernel.transpose(1, 2, 0).reshape(DIMENSIONS, -1)
        found[f"phrase{width}_bias"] = phrase.bias.detach().numpy()  # type: ignore[operator]
    for name in ("hidden", "out", "direct"):
        layer = getattr(network, name)
        found[name] = layer.weight.detach().numpy().T
        found[f"{name}_bias"] = layer.bias.detach().numpy()
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in found.items()}
