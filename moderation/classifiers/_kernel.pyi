"""Built from kernel.c."""

import numpy as np
from numpy.typing import NDArray

class Kernel:
    """`arrays`: the rows, hashes and counts of words, the filters by place, the matrix with its floor
    and the calibration with its offsets. `padding`: the words before a text, after it, and beyond."""

    def __new__(
        cls,
        arrays: tuple[NDArray[np.generic], ...],
        buckets: int,
        padding: tuple[int, int, int],
        /,
    ) -> Kernel: ...
    def logits(self, numbers: list[int], /) -> list[float]: ...
