"""Fits the linear half: logistic regressions over hashed words, word pairs and in-word n-grams."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack
from sklearn.linear_model import LogisticRegression

from moderation.classifiers.features import BUCKETS, Lexicon, gram_ids, words_of

Floats = NDArray[np.float32]


def matrix(texts: Sequence[str]) -> csr_matrix:
    """Return one row per text, scaled as in `Linear`: words and pairs, then in-word n-grams."""
    lexicon = Lexicon()
    columns, values, ends = [], [], [0]
    for text in texts:
        words = words_of(text[:4_000])
        grams = [BUCKETS + gram for word in dict.fromkeys(words) for gram in gram_ids(word)]
        pairs = lexicon.pairs(lexicon.numbers(words))
        columns.append(np.array([*pairs, *grams], dtype=np.int64))
        for count in (len(pairs), len(grams)):
            values.append(np.full(count, max(1, count) ** -0.5, dtype=np.float32))
        ends.append(ends[-1] + len(pairs) + len(grams))
    shape = (len(texts), 2 * BUCKETS)
    found = csr_matrix((np.concatenate(values), np.concatenate(columns), ends), shape=shape)
    found.sum_duplicates()
    return found


def fit_head(features: csr_matrix, labels: Floats, weights: Floats, strength: float) -> Floats:
    """Fit one head on the rows whose label is known; returns weights and, last, the bias.

    A soft label becomes two rows, a positive and a negative one, that share its weight.
    """
    known = ~np.isnan(labels)
    rows, labels, weights = features[known], labels[known], weights[known]
    soft = (labels > 0) & (labels < 1)
    model = LogisticRegression(C=strength, solver="liblinear", tol=0.01, max_iter=60)
    model.fit(
        vstack([rows, rows[soft]]),
        np.concatenate([labels > 0, np.zeros(soft.sum(), dtype=bool)]),
        np.concatenate([weights * np.where(soft, labels, 1), weights[soft] * (1 - labels[soft])]),
    )
    return np.concatenate([model.coef_[0], model.intercept_]).astype(np.float32)
