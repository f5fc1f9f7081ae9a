"""A quantised matrix in the layout that the kernel reads, and its products by torch.

A value is factor * (scale * (code - zero) + minimum): one factor a row, one scale and minimum a group of
inputs. Scales and minima are float16, as files have them; the factor, a power of two, keeps scales that
were computed in the range of float16.

Sixteen outputs are a tile. For each 32 inputs of a tile its codes are eight runs of 64 bytes, four inputs
of every output; with four bits, runs 0 to 3 are the low halves of four and runs 4 to 7 the high ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

LANES = 16
GROUP = 32
_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((_SIZES, -_SIZES))  # of the 16 codes: a sign, two bits of exponent, one more


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised matrix [out, in] as it is read: codes uint8 of zero `zero`, scales and minima
    float32, [out, groups]; `group` inputs share one. Column j belongs to input `order[j]`, where the
    inputs were sorted into groups.

    Codes of another `kind` than int are the bits of small floats, which GPUs alone compute with: e4m3
    (FP8) or e2m1 (MXFP4)."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    bits: int
    group: int
    zero: int
    order: torch.Tensor | None = None
    kind: str = "int"
    rounded_rows: bool = False  # the checkpoint is meant for rows of 8 bits too

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def format(self) -> tuple[Any, ...]:
        """What matrices must have in common to lie in one."""
        order = b"" if self.order is None else self.order.numpy().tobytes()
        kind = self.kind, self.bits, self.zero, self.rounded_rows
        return *kind, self.group, self.minima is not None, order

    @property
    def bytes(self) -> int:
        """As they are packed."""
        scales = 2 * self.scales.numel() * (1 if self.minima is None else 2)
        return self.codes.numel() * self.bits // 8 + scales

    def dense(self) -> torch.Tensor:
        """In float32."""
        width = self.codes.shape[1]
        found = self.scales.repeat_interleave(self.group, 1)[:, :width] * (
            numbers(self.codes, self.kind) - self.zero
        )
        if self.minima is not None:
            found += self.minima.repeat_interleave(self.group, 1)[:, :width]
        return _unsorted(found, self.order)

    def rows(self, order: torch.Tensor) -> "Codes":
        minima = None if self.minima is None else self.minima[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], minima=minima)


def numbers(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """What the codes stand for, in float32."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        return E2M1.to(codes.device)[codes.int()]
    return codes.float()


def _unsorted(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Columns in the order of the inputs."""
    if order is None:
        return values
    found = torch.empty_like(values)
    found[:, order] = values
    return found


def joined(parts: list[Codes]) -> Codes:
    """Matrices of one format and input as one, the first one's outputs first."""
    if len(parts) == 1:
        return parts[0]
    minima = [each.minima for each in parts if each.minima is not None]
    return replace(
        parts[0],
        codes=torch.cat([each.codes for each in parts]),
        scales=torch.cat([each.scales for each in parts]),
        minima=torch.cat(minima) if minima else None,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """See the module. `codes` [tiles, groups of 32, runs, lane, byte], the others [tiles, scales, lane]
    and, a row each, [tiles * lane]."""

    out: int
    width: int
    bits: int
    group: int
    zero: int
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    factors: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        held = (self.codes, self.scales, self.minima, self.factors, self.bias, self.order)
        return sum(each.nbytes for each in held if each is not None)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The values of these rows, in float32: [rows, width]."""
        return _unsorted(self._stored(numbers), self.order)

    def _stored(self, numbers: torch.Tensor) -> torch.Tensor:
        """With the columns as they are packed."""
        tile, lane = numbers // LANES, numbers % LANES
        runs = self.codes[tile, :, :, lane]  # [rows, groups, runs, 4]
        if self.bits == 4:
            runs = torch.cat((runs & 15, runs >> 4), 2)
        codes = runs.flatten(1).float() - self.zero
        scales = self.scales[tile, :, lane].float().repeat_interleave(self.group, 1)
        values = codes * scales[:, : codes.shape[1]]
        if self.minima is not None:
            minima = self.minima[tile, :, lane].float().repeat_interleave(self.group, 1)
            values += minima[:, : codes.shape[1]]
        return values[:, : self.width] * self.factors[numbers, None]

    def dense(self) -> torch.Tensor:
        return self.rows(torch.arange(self.out))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b with the rows of x in codes, as the kernel computes it but for the order of sums."""
        bias = None if self.bias is None else self.bias[: self.out]
        values = self._stored(torch.arange(self.out))
        return F.linear(in_codes(self.sorted(x).float()), values, bias).to(x.dtype)

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        """Rows with their values in the order of the columns."""
        return x if self.order is None else x.index_select(1, self.order)


def in_codes(x: torch.Tensor) -> torch.Tensor:
    """Every row of x in groups of 32 rounded to 255 steps, as the kernel reads it."""
    width = x.shape[-1]
    padded = F.pad(x, (0, -width % GROUP))
    groups = padded.view(*x.shape[:-1], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    codes = torch.where(scale > 0, groups / scale, groups * scale).round()
    return (codes * scale).flatten(-2)[..., :width]


def pack(matrix: Codes, bias: torch.Tensor | None = None) -> Packed:
    out, width = matrix.shape
    rows, columns = -out % LANES, -width % GROUP
    codes = F.pad(matrix.codes, (0, columns, 0, rows), value=matrix.zero)
    runs = codes.view(-1, LANES, codes.shape[1] // GROUP, 8, 4).permute(0, 2, 3, 1, 4)
    if matrix.bits == 4:
        runs = runs[:, :, :4] | runs[:, :, 4:] << 4
    # Groups of 16 in pairs: the kernel reads both of every 32 inputs.
    more = matrix.scales.shape[1] % 2 if matrix.group < GROUP else 0
    factors, (scales, minima) = in_half_range(matrix)
    return Packed(
        out=out,
        width=width,
        bits=matrix.bits,
        group=matrix.group,
        zero=matrix.zero,
        codes=runs.contiguous(),
        scales=_by_tile(scales, rows, more),
        minima=None if minima is None else _by_tile(minima, rows, more),
        factors=F.pad(factors, (0, rows)),
        bias=None if bias is None else F.pad(bias.float(), (0, rows)),
        order=matrix.order,
    )


def _by_tile(values: torch.Tensor, rows: int, more: int) -> torch.Tensor:
    padded = F.pad(values, (0, more, 0, rows))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).half().contiguous()


def in_half_range(matrix: Codes) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]:
    """A factor a row, and scales and minima divided by it: 1 where float16 holds them exactly."""
    held = [each for each in (matrix.scales, matrix.minima) if each is not None]
    exact = torch.stack([(each.half().float() == each).all(1) for each in held]).all(0)
    most = torch.stack([each.abs().amax(1) for each in held]).amax(0)
    exponent = torch.floor(torch.log2(most.clamp(min=1e-30))) - 12
    factors = torch.where(exact, 1.0, torch.exp2(exponent))
    parts = [each / factors[:, None] for each in held]
    return factors, (parts[0], parts[1] if len(parts) > 1 else None)
