"""Linear layers over packed floats, and the compiled products of these and of codes: a row's result does
not depend on the other rows.

torch chooses between products by the number of rows, and they add in different orders. Here every row is
added in one order (`product.h`), so a batch may be cut in any way.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch

from engine.backends.compiled.half import fits_half

_INTERFACE = 10  # of kernel.c
try:
    from engine.backends.compiled import _kernel as kernel
except ImportError:  # built without a C compiler
    kernel = None  # type: ignore[assignment]
if getattr(kernel, "INTERFACE", 0) != _INTERFACE:  # built by an earlier version
    kernel = None  # type: ignore[assignment]

DTYPES = (torch.float32, torch.bfloat16)
_LANES, _STEP = 16, 32  # outputs of a tile; the width is filled up to a multiple of it
PAIRED = ("amx", "avx512wide", "avx512bf16")  # instructions with products of bfloat16
KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def compiled() -> ModuleType:
    """The extension, where it is known to be there."""
    assert kernel is not None
    return kernel


def has_kernel() -> bool:
    return kernel is not None


def takes_rows(x: torch.Tensor) -> bool:
    """Whether rows of this type are computed here. x: [rows, width]."""
    return has_kernel() and x.dim() == 2 and x.dtype in DTYPES and x.device.type == "cpu"


def is_fast(weight: torch.Tensor, *, few_rows: bool) -> bool:
    """Whether these products are at least as fast as torch's: for any number of rows, or for few.

    Measured in bfloat16 with AMX, a model of 200M parameters on two threads beside oneDNN's products:
    32 rows decode in 0.72 to 0.77 of the time, prompts of 1,000 and 1,500 tokens take 0.53 to 0.73 of it,
    those of 512 0.9 to 1.07, of 300 1.18 to 1.22 and of 100 1.0 to 1.2. With AVX-512 alone, all products
    of SmolLM2-135M, one thread: 0.48 of oneDNN's time at one row, 0.78 at 8, 0.9 at 16, and 0.98 to 1.0
    at 32 to 128."""
    if kernel is None or weight.device.type != "cpu":
        return False
    if weight.dtype is torch.bfloat16:
        return multiplies(torch.bfloat16)
    return few_rows and weight.dtype is torch.float32 and not fits_half(weight)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether rows of this type are multiplied as they are."""
    pairs = dtype is torch.bfloat16 and instructions() in PAIRED
    return pairs or dtype is torch.float32


def instructions() -> str:
    return "" if kernel is None else kernel.instructions()


def pack_tiles(matrix: torch.Tensor, target: torch.Tensor) -> None:
    """matrix: [out, in]; target: [out, filled up to whole tiles, in], contiguous."""
    out, width = target.shape
    if out > len(matrix):
        matrix = torch.cat((matrix, matrix.new_zeros(out - len(matrix), width)))
    if matrix.dtype is torch.bfloat16:
        tiles = matrix.view(out // _LANES, _LANES, -1, 2).permute(0, 2, 1, 3)
    else:
        tiles = matrix.view(out // _LANES, _LANES, -1).permute(0, 2, 1)
    target.view(tiles.shape).copy_(tiles)


class CompiledMatrix(Protocol):
    """A matrix that the kernel reads, [out, width]."""

    out: int
    width: int
    places: tuple[int, int]  # the addresses of its weights and of its bias, 0 for none
    coded: bool
    kind: tuple[int, ...]  # what matrices of one product have in common


class PackedFloats:
    """A matrix [out, in] in tiles of 16 outputs: floats [in, 16], or bfloat16 in pairs of inputs
    [in / 2, 16, 2]."""

    coded = False
    kind: tuple[int, ...] = ()

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out, self.width = weight.shape
        tiles, filled = -(-self.out // _LANES), -(-self.width // _STEP) * _STEP
        whole = weight.new_zeros(tiles * _LANES, filled)
        whole[: self.out, : self.width] = weight
        self.tiles = torch.empty_like(whole)
        pack_tiles(whole, self.tiles)
        self.bias = None if bias is None else bias.float()
        self.places = self.tiles.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()


# A matrix and its gate.
Gated = tuple[CompiledMatrix, CompiledMatrix | None]
Group = tuple[CompiledMatrix, CompiledMatrix | None, int, int]  # first row, rows


class SiteTable:
    """Matrices of one input whose outputs follow each other, as `layers.h` reads them. It is kept as long
    as it is read."""

    def __init__(self, matrices: Sequence[Gated]) -> None:
        self.matrices = matrices
        self.outputs = sum(matrix.out for matrix, _ in matrices)
        self.rows = torch.tensor([
            (*matrix.places, *((0, 0) if gate is None else gate.places), matrix.out, matrix.coded)
            for matrix, gate in matrices
        ])  # fmt: skip
        self.address = self.rows.data_ptr()


def grouped_product(
    x: torch.Tensor,
    groups: Sequence[Group],
    activation: str = "silu",
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each group's rows of x: x W^T (+ other), or activation(x G^T) * (x W^T) with a gate G. The
    groups have matrices of one shape and cover all rows."""
    x = checked(x, groups[0][0].width)
    out = x.new_empty(x.shape[0], groups[0][0].out)
    multiply_into(x, groups, out, other, activation)
    return out


def checked(x: torch.Tensor, width: int) -> torch.Tensor:
    """The rows in a form that the kernel can read. Raises ValueError for rows of another width."""
    if x.dim() != 2 or x.shape[1] != width or x.device.type != "cpu":
        raise ValueError(f"rows of {width} values on the CPU are needed, not {tuple(x.shape)}")
    return x if x.stride(1) == 1 else x.contiguous()


def multiply_into(
    x: torch.Tensor,
    groups: Sequence[Group],
    out: torch.Tensor,
    other: torch.Tensor | None = None,
    activation: str = "silu",
) -> None:
    """As `grouped_product`. The last dimensions of x and out are contiguous."""
    if other is not None and other.stride(1) != 1:
        other = other.contiguous()
    listed = []
    for weights, gate, first, count in groups:
        place, bias = weights.places
        of_gate = (0, 0) if gate is None else gate.places
        listed.append((place, of_gate[0], bias, of_gate[1], first, count))
    compiled().product(
        listed, *out.shape[1:], x.shape[1], x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0),
        0 if other is None else other.data_ptr(), 0 if other is None else other.stride(0),
        x.dtype is torch.bfloat16, groups[0][0].coded, KINDS[activation], torch.get_num_threads(),
    )  # fmt: skip


def activate_(gate: torch.Tensor, activation: str, up: torch.Tensor | None = None) -> torch.Tensor:
    """activation(gate) (* up) in place, each row by itself. The last dimensions are contiguous."""
    compiled().activate(
        gate.data_ptr(), gate.stride(0), 0 if up is None else up.data_ptr(),
        0 if up is None else up.stride(0), *gate.shape, gate.dtype is torch.bfloat16,
        KINDS[activation],
    )  # fmt: skip
    return gate


class RowLinear:
    """Implements `engine.backends.layers.linear.Linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.matrix = PackedFloats(weight, bias)
        self.table = SiteTable([(self.matrix, None)])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return grouped_product(x, [(self.matrix, None, 0, len(x))])

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return grouped_product(x, [(self.matrix, None, 0, len(x))], other=other)


class RowGatedLinear:
    """Implements `engine.backends.layers.linear.GatedLinear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        gate, up = weight.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        self.gate, self.up = RowLinear(gate, biases[0]), RowLinear(up, biases[1])
        self.table = SiteTable([(self.up.matrix, self.gate.matrix)])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.halves(x), -1)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(x), self.up(x)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        matrices = self.up.matrix, self.gate.matrix
        return grouped_product(x, [(*matrices, 0, len(x))], activation)
