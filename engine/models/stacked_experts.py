"""Checkpoints that hold all experts of a layer as one tensor, as gpt-oss does: each by its usual name.

A layer has `gate_up_proj` [experts, in, 2 * out], whose columns are gate and up in turns, `down_proj`
[experts, in, out], and biases. In MXFP4 (OCP Microscaling Formats 1.0) a matrix is `_blocks`, two codes
of 4 bits a byte [experts, out, in / 32, 16], the first in the lower half, with a power of two for 32
inputs in `_scales` [experts, out, in / 32].
"""

import re
from pathlib import Path

import torch

from engine.backends.layers.packed import E2M1, Codes
from engine.errors import CheckpointError
from engine.model_spec import ExpertsSpec
from engine.models.formats.safetensors_source import SafetensorsSource

_NAME = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_GROUP, _ZERO = 32, 127  # inputs of a scale; the scale that stands for 1
_MOST = _ZERO + 100


class StackedExperts:
    """Implements `engine.models.weights.TensorSource` over another source."""

    def __init__(self, source: SafetensorsSource, experts: ExpertsSpec) -> None:
        self.path: Path = source.path
        self._source = source
        self._count = experts.count

    def __contains__(self, name: str) -> bool:
        stored = self._find(name)[0]
        return stored in self._source or f"{stored}_blocks" in self._source

    def __len__(self) -> int:
        return len(self._source)

    def place(self, name: str) -> str:
        stored = self._find(name)[0]
        return self._source.place(stored if stored in self._source else f"{stored}_blocks")

    def shape(self, name: str) -> tuple[int, ...]:
        stored, number, part = self._find(name)
        if number is None:
            return self._source.shape(stored)
        if stored in self._source:
            shape = self._source.shape(stored)
            shape = (*shape[:1], *reversed(shape[1:]))  # the outputs first
        else:
            shape = self._shape_of_blocks(stored)
        if shape[0] != self._count:
            raise CheckpointError(
                f"{self.place(name)} has {shape[0]} experts, the configuration asks for {self._count}"
            )
        return shape[1:] if part == "down" else (shape[1] // 2, *shape[2:])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, number, part = self._find(name)
        if number is None:
            return self._source.read(stored, dtype)
        if stored in self._source:
            found = self._source.part(stored, number)
            found = found.t() if found.dim() == 2 else found
        else:
            found = _dequantised(
                self._source.part(f"{stored}_blocks", number),
                self._source.part(f"{stored}_scales", number),
            )
        if part != "down":
            found = found[0 if part == "gate" else 1 :: 2]
        return found.to(dtype).contiguous()

    @property
    def format(self) -> str:
        return self._source.format

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        stored, number, part = self._find(name)
        if number is None:
            return self._source.codes(name, small_floats)
        if not small_floats or stored in self._source or not name.endswith("weight"):
            return None
        blocks = self._source.part(f"{stored}_blocks", number)
        scales = self._source.part(f"{stored}_scales", number)
        if (scales > _MOST).any():
            raise CheckpointError(f"{self.place(name)} has scales that are NaN or above 2^100")
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        rows = slice(None) if part == "down" else slice(0 if part == "gate" else 1, None, 2)
        return Codes(
            codes=codes[rows].contiguous(),
            scales=torch.ldexp(torch.ones(scales[rows].shape), scales[rows].int() - _ZERO),
            minima=None,
            bits=4,
            group=_GROUP,
            zero=0,
            kind="e2m1",
        )

    def stored_dtype(self) -> torch.dtype:
        return self._source.stored_dtype()

    def close(self) -> None:
        self._source.close()

    def _shape_of_blocks(self, stored: str) -> tuple[int, ...]:
        """[experts, out, in] of a matrix in MXFP4."""
        blocks, scales = f"{stored}_blocks", f"{stored}_scales"
        if scales not in self._source:
            raise CheckpointError(f"{self.path}: tensor {scales} is missing")
        shape, beside = self._source.shape(blocks), self._source.shape(scales)
        if len(shape) != 4 or shape[3] != _GROUP // 2 or beside != shape[:3]:
            raise CheckpointError(
                f"{self._source.place(blocks)} has shape {list(shape)} and its scales {list(beside)}: "
                f"[experts, out, in / {_GROUP}, {_GROUP // 2}] and a scale for each block are needed"
            )
        return shape[0], shape[1], shape[2] * _GROUP

    def _find(self, name: str) -> tuple[str, int | None, str]:
        """The stored tensor's name, and the expert and part of it that `name` is."""
        found = _NAME.fullmatch(name)
        if found is None:
            return name, None, ""
        root, number, part, kind = found.groups()
        stored = f"{root}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        return stored + ("_bias" if kind == "bias" else ""), int(number), part


def _dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[out, in] in float32."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
    values = torch.ldexp(E2M1[codes.int()], scales.int()[..., None] - _ZERO)
    return values.flatten(1)
