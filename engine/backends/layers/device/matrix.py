"""A matrix in the layout that a GPU's kernels read, and its values by torch.

Inputs are cut into spans, the most that one scale serves in an iteration of the product. `codes` is
[spans, out, bytes]: what a program reads of a span for neighbouring outputs is one run of memory. With
four bits, byte i of a span holds input i in its low half and input i + span / 2 in its high one.

A value is factor * (scale * (number - zero) + minimum), where the number is what its kind makes of the
code, one scale and minimum serve a group of inputs, and one factor an output.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.backends.layers.packed import LANES, Codes, in_half_range, numbers

SPANS = (128, 64, 32, LANES)  # of inputs: powers of two, as Triton's tiles are


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """See the module. Of experts, all tensors have one dimension more, the first."""

    kind: str  # int4, int8, the small floats e4m3 and e2m1, or float: as they are
    out: int
    width: int
    span: int
    group: int  # inputs that share a scale
    zero: int
    codes: torch.Tensor  # [spans, out, bytes] uint8
    scales: torch.Tensor  # [groups, out]; of e2m1 the exponents of powers of two, uint8
    minima: torch.Tensor | None  # [groups, out]
    factors: torch.Tensor | None  # [out] float32
    bias: torch.Tensor | None  # [out] float32
    order: torch.Tensor | None = None  # [width] int32: the input of each column
    rows: str = ""  # int8 or e4m3: what the checkpoint rounds rows to, each by its own scale

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("codes", "scales", "minima", "factors", "bias", "order")
        return {name: each for name in names if (each := getattr(self, name)) is not None}

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())

    def to(self, device: torch.device) -> "DeviceMatrix":
        moved: dict[str, Any] = {name: each.to(device) for name, each in self.tensors.items()}
        return replace(self, **moved)

    def dense(self) -> torch.Tensor:
        """[out, width] in float32, the columns in the order of the inputs."""
        values = _numbers(self).transpose(0, 1).flatten(1)
        groups = torch.arange(values.shape[1], device=values.device) // self.group
        found = _scales(self)[groups].t() * (values - self.zero)
        if self.minima is not None:
            found += self.minima.float()[groups].t()
        if self.factors is not None:
            found *= self.factors[:, None]
        found = found[:, : self.width]
        if self.order is None:
            return found
        return torch.empty_like(found).index_copy_(1, self.order.long(), found)


def from_codes(matrix: Codes, bias: torch.Tensor | None = None) -> DeviceMatrix:
    """Scales and minima of integers become float16, within 2^-11 where it does not hold them exactly."""
    out, width = matrix.shape
    groups = matrix.scales.shape[1]
    span = _span(matrix.group, groups, width, matrix.bits)
    codes = F.pad(matrix.codes, (0, -width % span), value=matrix.zero)
    codes = codes.view(out, -1, span).transpose(0, 1)
    if matrix.bits == 4:
        low, high = codes.chunk(2, -1)
        codes = low | high << 4
    factors: torch.Tensor | None = None
    scales, minima = matrix.scales, matrix.minima
    if matrix.kind == "int":
        factors, (scales, minima) = in_half_range(matrix)
    columns = codes.shape[0] * span
    group = columns if groups == 1 else matrix.group
    more = -(-columns // group) - groups  # a span of two groups may end in one that is not there
    return DeviceMatrix(
        kind=f"int{matrix.bits}" if matrix.kind == "int" else matrix.kind,
        out=out,
        width=width,
        span=span,
        group=group,
        zero=matrix.zero,
        codes=codes.contiguous(),
        scales=_by_group(scales, more, matrix.kind),
        minima=None if minima is None else _by_group(minima, more, matrix.kind),
        factors=factors,
        bias=None if bias is None else bias.float(),
        order=None if matrix.order is None else matrix.order.int(),
        rows=_rows(matrix, groups),
    )


def from_floats(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DeviceMatrix:
    """A matrix [out, in] whose codes are its values."""
    out, width = weight.shape
    span = _span(width, 1, width, 8)
    codes = F.pad(weight, (0, -width % span)).view(out, -1, span).transpose(0, 1).contiguous()
    ones = codes.new_ones(1, out)
    return DeviceMatrix(
        kind="float", out=out, width=width, span=span, group=codes.shape[0] * span, zero=0, codes=codes,
        scales=ones, minima=None, factors=None, bias=None if bias is None else bias.float(),
    )  # fmt: skip


def stacked(matrices: list[DeviceMatrix]) -> DeviceMatrix:
    """Matrices of experts as one. Raises ValueError where they have not one form."""
    first = matrices[0]
    tensors: dict[str, Any] = {}
    for name in {name for each in matrices for name in each.tensors}:
        held = [each.tensors.get(name) for each in matrices]
        some = next(each for each in held if each is not None)
        usual = torch.ones_like(some) if name == "factors" else torch.zeros_like(some)
        if name == "order":
            usual = torch.arange(len(some), dtype=some.dtype, device=some.device)
        parts = [usual if each is None else each for each in held]
        if any(each.shape != some.shape or each.dtype != some.dtype for each in parts):
            raise ValueError(f"their {name} differ in shape")
        tensors[name] = torch.stack(parts)
    for form in ("kind", "span", "group", "zero"):
        if any(getattr(each, form) != getattr(first, form) for each in matrices):
            raise ValueError(f"they differ in their {form}")
    return replace(first, **tensors)


def expert_of(matrix: DeviceMatrix, number: int) -> DeviceMatrix:
    """One matrix of those that are stacked."""
    own: dict[str, Any] = {name: each[number] for name, each in matrix.tensors.items()}
    return replace(matrix, **own)


def _span(group: int, groups: int, width: int, bits: int) -> int:
    """The largest that one scale serves; with 4 bits each half of it may have its own."""
    least = 2 * LANES if bits == 4 else LANES
    if groups == 1:
        return next((each for each in SPANS if least <= each <= max(width, least)), least)
    return next((each for each in SPANS if each >= least and group % each == 0), least)


def _rows(matrix: Codes, groups: int) -> str:
    """Products of integers need one scale an output; sums of small floats may have one a group."""
    if not matrix.rounded_rows or matrix.bits != 8:
        return ""
    if matrix.kind == "e4m3":
        return "e4m3"
    return "int8" if groups == 1 and matrix.minima is None and matrix.order is None else ""


def _by_group(values: torch.Tensor, more: int, kind: str) -> torch.Tensor:
    values = F.pad(values, (0, more)).t()
    if kind == "e2m1":
        return (torch.frexp(values.contiguous())[1] + 126).to(torch.uint8)
    return (values.half() if kind == "int" else values).contiguous()


def _scales(matrix: DeviceMatrix) -> torch.Tensor:
    """In float32."""
    if matrix.kind == "e2m1":
        return torch.ldexp(
            torch.ones_like(matrix.scales, dtype=torch.float32), matrix.scales.int() - 127
        )
    return matrix.scales.float()


def _numbers(matrix: DeviceMatrix) -> torch.Tensor:
    """[spans, out, span] in float32"""
    codes = matrix.codes
    if matrix.kind in ("int4", "e2m1"):
        codes = torch.cat((codes & 15, codes >> 4), -1)
    return numbers(codes, matrix.kind)
