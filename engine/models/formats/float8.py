"""Checkpoints in FP8 (e4m3): a matrix X.weight in 8-bit floats beside its scales.

The scales are X.weight_scale_inv or X.weight_scale, by which the values are multiplied whichever name
they have: one for the matrix, one for each output, or one for each block of outputs and inputs, of which
the last ones may be short (DeepSeek-V3's README_WEIGHTS). Scales of activations are not read: weights
become floats when they are loaded, or the codes of `--quantization int8` or `int4`, and rows stay as they
are.
"""

from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.models.formats.declared import Blocks
from engine.models.formats.quantised_source import QuantisedSource
from engine.models.quantised import FLOAT8

_SCALES = ("_scale_inv", "_scale")
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Float8Source(QuantisedSource):
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, directory: Path, blocks: Blocks) -> None:
        """`blocks`: the outputs and inputs that share a scale, of which each matrix has one kind."""
        super().__init__(directory, FLOAT8)
        self._blocks = blocks

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self.raw(name)
        beside = next((name + each for each in _SCALES if name + each in self._files), None)
        if beside is None and stored.dtype not in _EIGHT_BITS:
            return super().read(name, dtype)
        if stored.dtype is not torch.float8_e4m3fn or stored.dim() != 2:
            raise CheckpointError(
                f"{self.place(name)} is {stored.dtype} in {stored.dim()} dimensions: float8_e4m3fn in "
                "two was expected"
            )
        if beside is None:
            raise CheckpointError(f"{self.place(name)}_scale is missing")
        return (stored.float() * self._scales(beside, stored.shape)).to(dtype)

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
        for rows, columns in self._blocks:
            if scales.shape == (-(-out // rows), -(-width // columns)):
                of_rows = scales.repeat_interleave(rows, 0)[:out]
                return of_rows.repeat_interleave(columns, 1)[:, :width]
        blocks = "".join(f", or one for each block of {list(each)}" for each in self._blocks)
        raise CheckpointError(
            f"{self.place(name)} has shape {list(scales.shape)}: one scale for [{out}, {width}], one for "
            f"each output{blocks} is needed"
        )
