"""The port of a text classifier: texts in, one probability a head out."""

from collections.abc import Sequence
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
