"""Word vectors from co-occurrence in the folder's text: the initial vectors of the convolution.

Positive pointwise mutual information of neighbours, factored by a truncated SVD (Levy and Goldberg,
2014). Labels are not used, so words with few labelled texts also start near similar words.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix

from moderation.classifiers.features import words_of
from moderation.classifiers.train_sources import rows_of
from moderation.normalise import fold

Floats = NDArray[np.float32]
_WINDOW = 5
_LEAST = 5
_VOCABULARY = 22_000
_LONGEST = 6_000
# Smoothing of contexts after Levy, Goldberg and Dagan (2015): rare ones weigh less.
_SMOOTHING = 0.75


def unlabelled(data: Path) -> Iterator[str]:
    """Unlabelled texts of the folder, in addition to the labelled sets."""
    yield from (row["text"] for row in rows_of(data / "goemotions" / "train.tsv", "\t"))
    yield from (row["tweet"] for row in rows_of(data / "davidson" / "labeled_data.csv"))
    yield from (row["text"] for row in rows_of(data / "banking77" / "train.csv"))
    for path in sorted((data / "gpteacher").glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            yield f"{row['instruction']} {row['input']} {row['response']}"
    for line in (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        yield " ".join(json.loads(line).values())
    with gzip.open(
        data / "hh_rlhf_harmless_test" / "test.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        for line in file:
            yield json.loads(line)["chosen"]


def word_vectors(texts: Sequence[str], dimensions: int, seed: int) -> dict[str, Floats]:
    """Return a vector of norm one for each word that is frequent enough."""
    from sklearn.utils.extmath import randomized_svd

    tokens = [words_of(fold(text[:_LONGEST]).text) for text in texts]
    counts = Counter(word for text in tokens for word in text)
    words = [word for word, n in counts.most_common(_VOCABULARY) if n >= _LEAST]
    associations = _associations(tokens, {word: row for row, word in enumerate(words)})
    left, values, _ = randomized_svd(associations, dimensions, n_iter=4, random_state=seed)
    found = left * np.sqrt(values)
    found /= np.linalg.norm(found, axis=1, keepdims=True) + 1e-9
    return dict(zip(words, found.astype(np.float32), strict=True))


def _associations(tokens: Sequence[Sequence[str]], rows: dict[str, int]) -> csr_matrix:
    # -1 is a word that is too rare; the gap keeps two texts from being neighbours.
    gap = [-1] * _WINDOW
    flat = np.array([row for text in tokens for row in (*(rows.get(w, -1) for w in text), *gap)])
    near: Any = csr_matrix((len(rows), len(rows)), dtype=np.float32)
    for distance in range(1, _WINDOW + 1):
        one, other = flat[:-distance], flat[distance:]
        known = (one >= 0) & (other >= 0)
        weight = np.full(int(known.sum()), 1 / distance, dtype=np.float32)
        met = coo_matrix((weight, (one[known], other[known])), shape=near.shape).tocsr()
        near = near + met + met.T
    total = near.sum()
    share = np.asarray(near.sum(axis=1)).ravel() / total
    context = share**_SMOOTHING
    context /= context.sum()
    near = near.tocoo()
    value = np.log(near.data / total / (share[near.row] * context[near.col]))
    kept = value > 0
    shape = (len(rows), len(rows))
    found = coo_matrix((value[kept].astype(np.float32), (near.row[kept], near.col[kept])), shape)
    return found.tocsr()
