"""The port of a text classifier: texts in, one probability a head out."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Classifier(Protocol):
    @property
    def version(self) -> str:
        """A name that changes whenever the scores may."""
        ...

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return probabilities of shape (len(texts), len(HEADS)) for already folded texts."""
        ...


Rows = list[list[float]]
Cuts = Sequence[tuple[int, int]]  # start and end of each piece, in order


def scores_of_cuts(classifier: Classifier, text: str, cuts: Cuts) -> Rows:
    """Score pieces of one folded text, a row each.

    A classifier that is quicker with these than with as many texts has `score_cuts(text, cuts)`.
    """
    quicker: Callable[[str, Cuts], Rows] | None = getattr(classifier, "score_cuts", None)
    if quicker is not None:
        return quicker(text, cuts)
    rows: Rows = classifier.score([text[start:end] for start, end in cuts]).tolist()
    return rows
