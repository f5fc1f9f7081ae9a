"""Launches the products of quantised matrices; their reference is `product_reference` in this folder."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.formats.product import product_kernel
from engine.backends.gpu.formats.scaled import round_rows_kernel, scaled_kernel
from engine.backends.gpu.launch import capability, power_of_two, precision
from engine.backends.layers.device.linear import MOST, DeviceLinear, row_group
from engine.backends.layers.device.matrix import DeviceMatrix

FEW = 16  # rows up to which a program computes all of them
_ADA = 89  # the first devices that multiply e4m3
Rounded = tuple[Tensor, Tensor]  # the rows' codes [rows, inputs] and scales [rows, groups]


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    outputs: int
    warps: int
    stages: int


def tiles_for(rows: int, outputs: int, dtype: torch.dtype) -> Tiles:
    """Small tiles where few rows meet few outputs, so that every multiprocessor reads some of them."""
    wide = dtype == torch.float32
    if rows <= FEW:
        return Tiles(FEW, 64 if outputs > 16384 else 16, 4, 2 if wide else 5)
    return Tiles(64, 64, 4, 1 if wide else 3)


def quantized_linear(x: Tensor, linear: DeviceLinear, out: Tensor | None = None) -> Tensor:
    """x W^T + b: [rows, outputs], written to `out` if it is given. `x` is [rows, inputs] with
    neighbouring inputs side by side."""
    if out is None:
        out = torch.empty(x.shape[0], linear.out, dtype=x.dtype, device=x.device)
    first = 0
    rounded: dict[tuple[str, int, int], Rounded] = {}  # once for all parts that round alike
    for part in linear.parts:
        target = out[:, first : first + part.out]
        first += part.out
        if not rounds(part):
            product(x, part, target)
            continue
        key = part.rows, row_group(part), part.codes.shape[-3] * part.span
        if key not in rounded:
            rounded[key] = round_rows(x, part)
        scaled_product(rounded[key], part, target)
    return out


def rounds(matrix: DeviceMatrix) -> bool:
    """Whether rows are rounded: as the checkpoint says, where the device multiplies that type."""
    return matrix.rows == "int8" or (matrix.rows == "e4m3" and capability() >= _ADA)


def round_rows(x: Tensor, matrix: DeviceMatrix) -> Rounded:
    """Rows as the matrix takes them, with zeros up to whole spans."""
    most, kind = MOST[matrix.rows]
    group = row_group(matrix)
    groups = -(-matrix.codes.shape[-3] * matrix.span // group)
    codes = torch.empty(x.shape[0], groups * group, dtype=kind, device=x.device)
    scales = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    block = power_of_two(group)
    round_rows_kernel[(x.shape[0], groups)](
        codes, scales, x, x.stride(0), WIDTH=matrix.width, GROUP=group, GROUPS=groups,
        BLOCK=block, MOST=most, INTEGERS=matrix.rows == "int8",
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return codes, scales


def scaled_product(rounded: Rounded, matrix: DeviceMatrix, out: Tensor) -> None:
    """out = x W^T + b for rows that are rounded."""
    x, row_scales = rounded
    tiles = tiles_for(x.shape[0], matrix.out, torch.int8)
    held = matrix.scales
    scaled_kernel[(-(-matrix.out // tiles.outputs), -(-x.shape[0] // tiles.rows))](
        out, x, row_scales, matrix.codes, held, held if matrix.factors is None else matrix.factors,
        held if matrix.bias is None else matrix.bias, x.shape[0], x.stride(0),
        out.stride(0), OUTPUTS=matrix.out, SPANS=matrix.codes.shape[-3], SPAN=matrix.span,
        GROUP=matrix.group, GROUPS=row_scales.shape[1], INTEGERS=matrix.rows == "int8",
        FACTORS=matrix.factors is not None, BIAS=matrix.bias is not None,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sorted:
    """The choices of a step's tokens, sorted by expert."""

    chunks: (
        Tensor  # [chunks, 3] int32: an expert, its first place in the order, its count (0: none)
    )
    places: Tensor  # [choices] int32: the number of the choice at each place of the order
    rows: int  # most rows in a chunk
    active: int  # choices of a token
    by_token: bool  # x has a row for each token, not for each place


def product(x: Tensor, matrix: DeviceMatrix, out: Tensor, experts: Sorted | None = None) -> None:
    """out = x W^T + b, with rows by place in the order where they are of experts."""
    rows, order = x.shape[0], matrix.order
    if order is not None and rows > FEW and experts is None:
        # Many programs read each row: gathering it once costs less than scattered reads by each.
        x, order = x.index_select(1, order), None
    tiles = tiles_for(rows if experts is None else experts.rows, matrix.out, x.dtype)
    kind, held = "", matrix.scales
    row_tiles = -(-rows // tiles.rows)
    if experts is not None:
        kind, row_tiles = "tokens" if experts.by_token else "sorted", experts.chunks.shape[0]
    product_kernel[(-(-matrix.out // tiles.outputs), row_tiles)](
        out, x, matrix.codes, held, held if matrix.minima is None else matrix.minima,
        held if matrix.factors is None else matrix.factors,
        held if matrix.bias is None else matrix.bias, held if order is None else order,
        held if experts is None else experts.chunks, held if experts is None else experts.places,
        rows, x.stride(0), out.stride(0),
        INPUTS=matrix.width, OUTPUTS=matrix.out, KIND=matrix.kind, ZERO=matrix.zero,
        SPAN=matrix.span, GROUP=matrix.group, GROUPS=held.shape[-2], MINIMA=matrix.minima is not None,
        FACTORS=matrix.factors is not None, BIAS=matrix.bias is not None, ORDERED=order is not None,
        EXPERTS=kind, ACTIVE=1 if experts is None else experts.active,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, PRECISION=precision(x),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
