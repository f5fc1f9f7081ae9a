"""A GGUF file's tensors for the decoder: dequantised a few rows at a time into the served type.

The data is read and not mapped: resident pages of a mapping count against a memory limit, and a
file that is cut while it is mapped ends the process.
"""

import math

import numpy as np
import torch

from engine.errors import CheckpointError
from engine.models.gguf.dequantise import dequantise
from engine.models.gguf.fields import fields_of
from engine.models.gguf.header import GgufHeader
from engine.models.gguf.names import Placed, hugging_face_names
from engine.models.gguf.types import BF16, BLOCKS, F32

_VALUES_AT_ONCE = 1 << 19
_EXACT = {F32: torch.float32, BF16: torch.bfloat16}


class GgufSource:
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._placed = hugging_face_names(header, fields_of(header))
        self._file = header.path.open("rb")

    def __contains__(self, name: str) -> bool:
        return name in self._placed

    def __len__(self) -> int:
        return len(self._placed)

    def names(self) -> list[str]:
        return list(self._placed)

    def place(self, name: str) -> str:
        return f"{self.path}: {self._placed[name].info.name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._placed[name].info.shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        placed = self._placed[name]
        info = placed.info
        out = torch.empty(info.shape, dtype=dtype)
        flat = out.view(-1)
        values, size = BLOCKS[info.type]
        step = _VALUES_AT_ONCE // values * values
        self._file.seek(info.start)
        for first in range(0, len(flat), step):
            last = min(first + step, len(flat))
            raw = np.fromfile(self._file, np.uint8, (last - first) // values * size)
            if len(raw) * values != (last - first) * size:
                raise CheckpointError(f"{self.place(name)} cannot be read: the file was cut off")
            with np.errstate(invalid="ignore", over="ignore"):  # the values are checked once read
                found = dequantise(info.type, raw)
            if placed.offset:
                found = found - np.float32(placed.offset)
            flat[first:last] = torch.from_numpy(found)
        return _in_halves(out, placed.heads) if placed.heads else out

    def stored_dtype(self) -> torch.dtype:
        """Quantised values count as float16, the type of their factors."""
        largest = max(self._placed.values(), key=_values)
        return _EXACT.get(largest.info.type, torch.float16)

    def close(self) -> None:
        self._file.close()


def _values(placed: Placed) -> int:
    return math.prod(placed.info.shape)


def _in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from neighbours that are rotated together back to halves."""
    if tensor.shape[0] % (2 * heads):
        return tensor  # refused by its shape
    apart = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return apart.transpose(1, 2).reshape(tensor.shape)


def loaded_bytes(header: GgufHeader, dtype: torch.dtype) -> int:
    return sum(math.prod(info.shape) for info in header.tensors.values()) * dtype.itemsize
