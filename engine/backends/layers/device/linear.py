"""Linear layers of a GPU over quantised matrices. As functions they are the reference in torch; a step
computes them by `engine.backends.gpu.formats`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.backends.layers.device.matrix import DeviceMatrix
from engine.backends.layers.linear import activate

# By what rows are rounded to: the greatest value, and the type.
MOST = {"int8": (127.0, torch.int8), "e4m3": (448.0, torch.float8_e4m3fn)}


class DeviceLinear:
    """Implements `GatedLinear` over matrices of one input, whose outputs follow each other;
    each may have a format of its own."""

    def __init__(self, parts: Sequence[DeviceMatrix]) -> None:
        self.parts = list(parts)
        self.out = sum(part.out for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([product_reference(x, part) for part in self.parts], -1)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = self(x).chunk(2, -1)
        return gate, up

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = self.halves(x)
        return activate(gate, activation).mul_(up)


def product_reference(x: torch.Tensor, matrix: DeviceMatrix, rounded: bool = True) -> torch.Tensor:
    """x W^T + b, computed in float32 and rounded at the end. With `rounded`, rows are rounded first
    where the matrix is meant for it."""
    rows = x.float()
    if rounded and matrix.rows:
        codes, scales = round_rows_reference(rows, matrix.rows, row_group(matrix))
        rows = (codes.float() * scales[:, :, None]).flatten(1)[:, : x.shape[1]]
    return F.linear(rows, matrix.dense(), matrix.bias).to(x.dtype)


def row_group(matrix: DeviceMatrix) -> int:
    """Inputs of a row that are rounded by one scale."""
    return min(matrix.group, matrix.codes.shape[-3] * matrix.span)


def round_rows_reference(x: torch.Tensor, to: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [rows, groups, group] of a type of 8 bits, scales [rows, groups] float32): the greatest of a
    group is the greatest code. A row with a value that is not finite has scales that are not."""
    most, kind = MOST[to]
    groups = F.pad(x.float(), (0, -x.shape[1] % group)).view(x.shape[0], -1, group)
    scales = groups.abs().amax(2) / most
    codes = torch.where(scales[:, :, None] > 0, groups / scales[:, :, None], 0)
    return (codes.round() if to == "int8" else codes).to(kind), scales + (groups * 0).sum(2)
