"""Built from kernel.c. Rows are (address, elements from one row to the next)."""

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.generic]
_Rows = tuple[int, int]

INTERFACE: int

class Matrix:
    """`arrays`: codes, scales, minima or None, factors, bias or None, as `packed.Packed` has them."""

    def __new__(
        cls,
        arrays: tuple[_Array, _Array, _Array | None, _Array, _Array | None],
        out: int,
        groups: int,
        bits: int,
        group: int,
        zero: int,
        /,
    ) -> Matrix: ...

def product(
    matrix: Matrix,
    x: _Rows,
    out: _Rows,
    other: _Rows | None,
    width: int,
    rows: int,
    brain: bool,
    threads: int,
    /,
) -> None:
    """out = x W^T + bias (+ other). `brain`: rows are bfloat16, not float32."""

def gated(
    gate: Matrix,
    up: Matrix,
    x: _Rows,
    out: _Rows,
    width: int,
    rows: int,
    brain: bool,
    threads: int,
    gelu: bool,
    /,
) -> None:
    """out = activation(x G^T) * (x U^T), for two matrices of one format."""

def store_kv(
    pool: int,
    slots: int,
    heads: int,
    stride: int,
    count: int,
    heads_of_token: int,
    dim: int,
    size: int,
    brain: bool,
    fp8: bool,
    /,
) -> None:
    """Rounds `count` heads to 8 bits at their KV slots. `pool`, `slots`, `heads`: addresses, of the
    layer's first row, of int64 and of floats, whose tokens are `stride` elements apart."""

def gather_kv(
    pool: int,
    rows: int,
    out: int,
    count: int,
    dim: int,
    size: int,
    brain: bool,
    fp8: bool,
    threads: int,
    /,
) -> None:
    """The floats of `count` rows of the pool. `rows`: the address of int64."""

def instructions(name: str | None = None, /) -> str:
    """Which instructions are used; `name` (avx512, avx2, plain) chooses them."""
