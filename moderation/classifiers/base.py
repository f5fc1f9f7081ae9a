"""The interface of a text classifier: texts in, one probability per head out."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Classifier(Protocol):
    @property
    def version(self) -> str:
        """A name that changes whenever the scores may change."""
        ...

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return probabilities of shape (len(texts), len(HEADS)) for folded texts."""
        ...


Rows = list[list[float]]
Cuts = Sequence[tuple[int, int]]  # start and end of each piece, in order


def scores_of_cuts(classifier: Classifier, text: str, cuts: Cuts) -> Rows:
    """Score pieces of one folded text; returns one row per piece.

    A classifier with a faster way to do this than scoring separate texts has
    `score_cuts(text, cuts)`.
    """
    quicker: Callable[[str, Cuts], Rows] | None = getattr(classifier, "score_cuts", None)
    if quicker is not None:
        return quicker(text, cuts)
    rows: Rows = classifier.score([text[start:end] for start, end in cuts]).tolist()
    return rows
