"""Checkpoints in FP8 (e4m3): a matrix X.weight in 8-bit floats and its scales.

The scales are X.weight_scale_inv or X.weight_scale, by which the values are multiplied whichever name
they have: one for the matrix, one for each output, or one for each block of outputs and inputs, of which
the last ones may be short (DeepSeek-V3's README_WEIGHTS). Scales of activations are not read.
On a CPU weights become floats when they are loaded, or the codes of `--quantization int8` or `int4`, and
rows stay as they are; a GPU computes with the bits, and rounds rows by scales of their own where the
checkpoint says so.
"""

from pathlib import Path

import torch

from engine.backends.layers.packed import GROUP, Codes
from engine.errors import CheckpointError
from engine.models.formats.declared import Blocks
from engine.models.formats.quantised import FLOAT8
from engine.models.formats.quantised_source import QuantisedSource

_SCALES = ("_scale_inv", "_scale")
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Float8Source(QuantisedSource):
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, directory: Path, blocks: Blocks, rounded_rows: bool = False) -> None:
        """`blocks`: the outputs and inputs that share a scale, of which each matrix has one kind.
        `rounded_rows`: rows are meant to be rounded, too."""
        super().__init__(directory, FLOAT8)
        self._blocks = blocks
        self._rounded_rows = rounded_rows

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self.raw(name)
        beside = self._scale_name(name)
        if beside is None and stored.dtype not in _EIGHT_BITS:
            return super().read(name, dtype)
        scales = self._scales(self._checked(name, stored, beside), stored.shape)
        return (stored.float() * scales).to(dtype)

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        """Where the scales serve all inputs or whole groups of 32; None for other matrices."""
        beside = self._scale_name(name)
        if beside is None or not small_floats:
            return None
        stored = self.raw(name)
        scales = self._scales(self._checked(name, stored, beside), stored.shape)
        out, width = stored.shape
        group = -(-width // GROUP) * GROUP
        if scales.shape[1] > 1:
            found = self._block_of(self.shape(beside), stored.shape)
            assert found is not None
            if found[1] < width:
                group = found[1]
            scales = scales[:, ::group]
        if group % GROUP:
            return None
        codes = stored.view(torch.uint8)
        if ((codes & 127) == 127).any():
            raise CheckpointError(f"{self.place(name)} holds NaN")
        return Codes(
            codes=codes,
            scales=scales.expand(out, scales.shape[1]).contiguous(),
            minima=None,
            bits=8,
            group=group,
            zero=0,
            kind="e4m3",
            rounded_rows=self._rounded_rows,
        )

    def _scale_name(self, name: str) -> str | None:
        return next((name + each for each in _SCALES if name + each in self._files), None)

    def _checked(self, name: str, stored: torch.Tensor, beside: str | None) -> str:
        if stored.dtype is not torch.float8_e4m3fn or stored.dim() != 2:
            raise CheckpointError(
                f"{self.place(name)} is {stored.dtype} in {stored.dim()} dimensions: float8_e4m3fn in "
                "two was expected"
            )
        if beside is None:
            raise CheckpointError(f"{self.place(name)}_scale is missing")
        return beside

    def _block_of(self, scales: tuple[int, ...], shape: torch.Size) -> tuple[int, int] | None:
        out, width = shape
        for rows, columns in self._blocks:
            if tuple(scales) == (-(-out // rows), -(-width // columns)):
                return rows, columns
        return None

    def _scales(self, name: str, shape: torch.Size) -> torch.Tensor:
        """In float32: one, a column, or one for each value."""
        scales = self.raw(name)
        out, width = shape
        if not scales.is_floating_point():
            raise CheckpointError(f"{self.place(name)} is {scales.dtype}: floats are needed")
        scales = scales.float()
        if not (torch.isfinite(scales).all() and (scales > 0).all()):
            raise CheckpointError(f"{self.place(name)} holds values that are not above 0")
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        if scales.shape in ((out,), (out, 1)):
            return scales.reshape(out, 1)
        found = self._block_of(scales.shape, shape)
        if found is not None:
            of_rows = scales.repeat_interleave(found[0], 0)[:out]
            return of_rows.repeat_interleave(found[1], 1)[:, :width]
        blocks = "".join(f", or one for each block of {list(each)}" for each in self._blocks)
        raise CheckpointError(
            f"{self.place(name)} has shape {list(scales.shape)}: one scale for [{out}, {width}], one for "
            f"each output{blocks} is needed"
        )
