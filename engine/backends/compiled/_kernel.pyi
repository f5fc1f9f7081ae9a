"""Built from kernel.c. Memory is given by address; strides are elements from one row to the next."""

import numpy as np
from numpy.typing import NDArray

INTERFACE: int
_Array = NDArray[np.generic]

class Matrix:
    """`arrays`: codes, scales, minima or None, and factors, as `packed.Packed` has them."""

    address: int  # where products find it

    def __new__(
        cls,
        arrays: tuple[_Array | None, ...],
        out: int,
        groups: int,
        bits: int,
        group: int,
        zero: int,
        /,
    ) -> Matrix: ...

# (weights, gate, bias, gate bias, first row, rows): packed matrices, or the
# addresses of matrices of codes, and float biases; 0 for none.
_Group = tuple[int, int, int, int, int, int]

def product(
    groups: list[_Group],
    outputs: int,
    width: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    other: int,
    other_stride: int,
    bf16: bool,
    coded: bool,
    kind: int,
    threads: int,
    /,
) -> None:
    """out = x W^T + bias (+ other) for each group's rows; with a gate (x W^T + bias) times its
    activation. `bf16`: rows and weights are bfloat16, not float32. `coded`: weights
    are codes. `kind`: of the activation. Raises ValueError for codes of another shape or format."""

def activate(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    rows: int,
    width: int,
    bf16: bool,
    kind: int,
    /,
) -> None:
    """gate = activation(gate) * up, in place; without a product where `up` is 0."""

def add_ranks(
    x: int,
    x_stride: int,
    a: int,
    b: int,
    out: int,
    out_stride: int,
    rows: int,
    width: int,
    rank: int,
    outputs: int,
    bf16: bool,
    threads: int,
    /,
) -> None:
    """out += (x A^T) B, for A [rank, width] and B [rank, outputs]."""

def route(
    table: int, x: int, shares: int, chosen: int, rows: int, bf16: bool, threads: int, /
) -> None:
    """Each row's experts, the likeliest first: float32 shares, rounded as rows are, and int64 numbers,
    [rows, active]. table: int64, as `mixture.h` names its fields. x: [rows, hidden], contiguous."""

def mix(table: int, x: int, out: int, rows: int, bf16: bool, kind: int, threads: int, /) -> None:
    """A layer's mixture, without its shared expert. x and out: [rows, hidden], contiguous."""

def adapted(
    adapters: list[tuple[int, int, int, int, int, int]],
    layer: int,
    site: int,
    part: int,
    matrices: int,
    ends: tuple[int, int],
    x: int,
    out: int,
    other: int,
    shape: tuple[int, int, int, int, int],
    bf16: bool,
    threads: int,
    /,
) -> None:
    """A site's product with what the adapters of the rows add, and `other`. adapters: (matrices, offsets,
    changed parts, rank, first row, rows); matrices: the address of a `SiteTable`, or 0; part: -1,
    or the only one whose outputs these are; ends: outputs before the second and third part, or zeros;
    shape: (rows, width, outputs, elements between their rows, activation)."""

def attend(
    q: int,
    stride: int,
    pool: int,
    k: int,
    v: int,
    out: int,
    starts: int,
    newest: int,
    sinks: int,
    shape: tuple[int, int, int, int, int, int, int, int],
    scale: float,
    cap: float,
    bf16: bool,
    threads: int,
    /,
) -> None:
    """out [rows, heads, dim]. k and v: rows of the pool, [sequences, kv heads, positions / block size],
    each [block size, dim]. shape: (sequences, queries, positions, kv heads, group, dim, window,
    block size)."""

def norm(
    x: int,
    stride: int,
    weight: int,
    out: int,
    out_stride: int,
    rows: int,
    heads: int,
    width: int,
    eps: float,
    bf16: bool,
    threads: int,
    /,
) -> None:
    """out = x / rms(x) * weight, for each of a row's heads, and float32 weights. `bf16`: x and out are
    bfloat16."""

def place(
    x: int,
    stride: int,
    cos: int,
    sin: int,
    angle_stride: int,
    pool: int,
    slots: int,
    shape: tuple[int, int, int, int, int],
    bf16: bool,
    threads: int,
    /,
) -> None:
    """Rotates the first heads of x in place, then stores others at `slots` [rows, stored]. shape:
    (rows, rotated heads, first stored head, stored heads, dim)."""

def exclude(
    logits: int, stride: int, vocab: int, masks: int, words: int, index: int, rows: int, /
) -> None:
    """Adds minus infinity to the float32 logits whose bit in `masks`, uint32 [rows, words], is not set.
    index: the row of the logits for each row of the masks, int64."""

def greatest(logits: int, stride: int, vocab: int, ids: int, rows: int, /) -> None:
    """ids: int64, of each row's greatest float32 logit, the first; -1 where one is not a number, or the
    greatest is infinite."""

def store_kv(
    pool: int,
    slots: int,
    heads: int,
    stride: int,
    count: int,
    heads_of_token: int,
    dim: int,
    size: int,
    bf16: bool,
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
    bf16: bool,
    fp8: bool,
    threads: int,
    /,
) -> None:
    """The floats of `count` rows of the pool. `rows`: the address of int64."""

def sum_ranks(peers: int, x: int, count: int, bf16: bool, /) -> bool:
    """x becomes the sum of all ranks' x. `peers`: the address of what `group.Group` has. Whether all
    ranks came."""

def meet_ranks(peers: int, x: int, bytes: int, /) -> bool:
    """Gives the other ranks these bytes, and waits for theirs. Whether all ranks came."""

def post(posted: int, count: int, /) -> None:
    """Sets a count, with the number of those asleep behind it, that others wait for."""

def await_post(posted: int, least: int, over: int, spin_ns: int, patience_ns: int, /) -> int:
    """0: the count is `least`; 1: the time is over; 2: the number at `over` is not 0."""

def instructions(name: str | None = None, /) -> str:
    """Which instructions are used; `name` (as in `levels` of kernel.c) chooses them."""
