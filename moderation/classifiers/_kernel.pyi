"""Built from kernel.c."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

INTERFACE: int

class LooseText:
    """As `loose.PlainLooseText`."""

    def add(self, text: str, /) -> str: ...
    def rest(self) -> str: ...

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

class Window:
    """As `windows.PlainWindow`, of words that `numbers` and `vocabulary` number. `number_of` numbers
    others, `scratch` is the number of unfinished ones, and `limits` has one for each head."""

    def __new__(
        cls,
        kernel: Kernel,
        numbers: dict[str, int],
        vocabulary: dict[str, int],
        number_of: Callable[[str], int],
        scratch: int,
        reach: int,
        limits: tuple[float, ...],
        /,
    ) -> Window: ...
    def add(self, text: str, /) -> bool: ...
    def read(self, text: str, /) -> int: ...
    def look(self, tail: str = "", /) -> list[float] | None: ...
