"""Built from kernel.c."""

import numpy as np
from numpy.typing import NDArray

INTERFACE: int

class Kernel:
    """`arrays`: the rows, hashes and counts of words and their phrases by place, which `add_word`
    writes; the matrix with its floor, the calibration with its offsets; the weights and vectors of
    n-grams, the vectors of words, and the filters and biases by place. `padding`: the words before a
    text, after it, and beyond."""

    def __new__(
        cls,
        arrays: tuple[NDArray[np.generic], ...],
        buckets: int,
        padding: tuple[int, int, int],
        /,
    ) -> Kernel: ...
    def logits(self, numbers: list[int], /) -> list[float]: ...
    def scores(self, numbers: list[int], /) -> list[float]: ...
    def add_word(self, number: int, word: bytes, hash: int, /) -> int: ...
