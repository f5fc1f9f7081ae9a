"""Built from kernel.c. Memory is given by address; strides are elements from one row to the next."""

INTERFACE: int

# (weights, gate, bias, gate bias, first row, rows): packed matrices and float biases; 0 for none.
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
    brain: bool,
    kind: int,
    threads: int,
    /,
) -> None:
    """out = x W^T + bias (+ other) for each group's rows; with a gate (x W^T + bias) times its
    activation. `brain`: rows and weights are bfloat16, not float32. `kind`: of the activation."""

def activate(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    rows: int,
    width: int,
    brain: bool,
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
    brain: bool,
    threads: int,
    /,
) -> None:
    """out += (x A^T) B, for A [rank, width] and B [rank, outputs]."""

def attend(
    q: int,
    stride: int,
    k: int,
    v: int,
    out: int,
    starts: int,
    newest: int,
    sinks: int,
    shape: tuple[int, int, int, int, int, int, int],
    scale: float,
    cap: float,
    brain: bool,
    threads: int,
    /,
) -> None:
    """out [rows, heads, dim]. shape: (sequences, queries, positions, kv heads, group, dim, window)."""

def instructions(name: str | None = None, /) -> str:
    """Which instructions are used; `name` (amx, avx512bf16, avx512, avx2, plain) chooses them."""
