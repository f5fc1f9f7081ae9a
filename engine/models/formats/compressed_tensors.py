"""Checkpoints in compressed-tensors' integer formats: `pack-quantized` and `int-quantized`.

A matrix X.weight is X.weight_packed, codes of 4 or 8 bits in words of 32 with X.weight_shape, or X.weight
in int8; with it X.weight_scale [out, groups], and X.weight_zero_point where it is not symmetric, which
is packed along the outputs with `pack-quantized`. With act-order by group, X.weight_g_idx [in] says which
group each input was sorted into. Activations are rounded by the product itself.
"""

from pathlib import Path

import torch

from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.models.formats.quantised import COMPRESSED
from engine.models.formats.quantised_source import QuantisedSource

PACKED, SHAPE, SCALE, ZERO = "_packed", "_shape", "_scale", "_zero_point"
_INDEX = "_g_idx"
_WORD = 32


class CompressedSource(QuantisedSource):
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(
        self, directory: Path, sorted_by_group: bool = False, rounded_rows: bool = False
    ) -> None:
        """`sorted_by_group`: matrices in groups have X.weight_g_idx [in], the group of each input.
        `rounded_rows`: rows are meant to be rounded to 8 bits, too."""
        super().__init__(directory, COMPRESSED)
        self._sorted = sorted_by_group
        self._rounded_rows = rounded_rows

    @property
    def format(self) -> str:
        return "compressed-tensors"

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or super().__contains__(name + PACKED)

    def place(self, name: str) -> str:
        if super().__contains__(name):
            return super().place(name)
        return f"{self._files[name + PACKED].path}: {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        if name + PACKED not in self._files:
            return super().shape(name)
        shape = self.needed(name + SHAPE).flatten().tolist()
        if len(shape) != 2 or min(shape) < 1:
            raise CheckpointError(f"{self.place(name)}{SHAPE} is {shape}: two sizes are needed")
        return shape[0], shape[1]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        codes = self.codes(name)
        return super().read(name, dtype) if codes is None else codes.dense().to(dtype)

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        if name + SCALE not in self._files:
            if name + PACKED in self._files:
                raise CheckpointError(f"{self.place(name)}{SCALE} is missing")
            return None
        if name + PACKED in self._files:
            return self._packed(name)
        stored = self.needed(name)
        if stored.dtype is not torch.int8 or stored.dim() != 2:
            raise CheckpointError(f"{self.place(name)} is {stored.dtype}: int8 was expected")
        signed = stored.short()
        zero = self.needed(name + ZERO).short() if name + ZERO in self._files else None
        return self._coded(name, signed, zero, 8)

    def _packed(self, name: str) -> Codes:
        out, width = self.shape(name)
        words = self.needed(name + PACKED)
        bits = {-(-width // 8): 4, -(-width // 4): 8}.get(words.shape[-1])
        if bits is None or words.shape != (out, -(-width * bits // _WORD)):
            raise CheckpointError(
                f"{self.place(name)}{PACKED} has shape {list(words.shape)}: codes of 4 or 8 bits for "
                f"[{out}, {width}] are needed"
            )
        signed = unpacked(words, bits)[:, :width]
        zero = None
        if name + ZERO in self._files:
            stored = self.needed(name + ZERO)
            rows = -(-out * bits // _WORD)
            if stored.dim() != 2 or stored.shape[0] != rows:
                raise CheckpointError(
                    f"{self.place(name)}{ZERO} has shape {list(stored.shape)}: {rows} rows are needed"
                )
            zero = unpacked(stored.t().contiguous(), bits)[:, :out].t()
        return self._coded(name, signed, zero, bits)

    def _coded(
        self, name: str, signed: torch.Tensor, zero: torch.Tensor | None, bits: int
    ) -> Codes:
        """From codes and zero points around 0."""
        out, width = signed.shape
        scales = self.needed(name + SCALE).float()
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        groups = scales.shape[-1] if scales.dim() == 2 else 0
        if groups < 1 or scales.shape[0] not in (1, out) or width % groups:
            raise CheckpointError(
                f"{self.place(name)}{SCALE} has shape {list(scales.shape)}: a scale for each of equal "
                f"groups of [{out}, {width}] is needed"
            )
        if not (torch.isfinite(scales).all() and (scales > 0).all()):
            raise CheckpointError(f"{self.place(name)}{SCALE} holds values that are not above 0")
        scales = scales.expand(out, groups)
        middle = 1 << (bits - 1)
        minima = None
        if zero is not None:
            if zero.shape != scales.shape:
                raise CheckpointError(
                    f"{self.place(name)}{ZERO} has shape {list(zero.shape)}: {list(scales.shape)} is "
                    "needed"
                )
            minima = -scales * (zero.float() + (middle if bits == 4 else 0))
        order = self._order(name, width, groups)
        signed = signed if order is None else signed[:, order]
        return Codes(
            codes=(signed + middle).to(torch.uint8),
            scales=scales.contiguous(),
            minima=minima,
            bits=bits,
            group=self.check_group(name, width // groups, width),
            zero=0 if bits == 4 and minima is not None else middle,
            order=order,
            rounded_rows=self._rounded_rows,
        )

    def _order(self, name: str, width: int, groups: int) -> torch.Tensor | None:
        index = name + _INDEX
        if not self._sorted or groups == 1:
            return None
        if index in self._files and (self.raw(index) == -1).all():
            return None  # which stands for an order that was not changed
        if index not in self._files:
            raise CheckpointError(f"{self.path}: tensor {index} is missing")
        return self.order(index, width, width // groups)


def packed(signed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes around 0 [rows, width] as words of 32 bits, the first in the lowest bits."""
    each = _WORD // bits
    shifted = signed.long() + (1 << (bits - 1))
    shifted = torch.nn.functional.pad(shifted, (0, -signed.shape[1] % each))
    lanes = shifted.view(signed.shape[0], -1, each) << torch.arange(0, _WORD, bits)
    return lanes.sum(2).to(torch.int32)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    lanes = words.to(torch.int32)[:, :, None] >> torch.arange(0, _WORD, bits, dtype=torch.int32)
    codes = (lanes & ((1 << bits) - 1)).flatten(1)
    return (codes - (1 << (bits - 1))).short()
