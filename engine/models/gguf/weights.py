"""A GGUF file's tensors for the decoder: as codes, or dequantised a few rows at a time.

The data is read and not mapped: resident pages of a mapping count against a memory limit, and a
file that is cut while it is mapped ends the process.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.models.gguf.codes import Array, BlockCodes
from engine.models.gguf.dequantise import codes_of, dequantise, has_codes
from engine.models.gguf.fields import fields_of
from engine.models.gguf.header import GgufHeader
from engine.models.gguf.names import Placed, hugging_face_names
from engine.models.gguf.types import BF16, BLOCKS, F32, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, type_name
from engine.regular_files import open_regular

_VALUES_AT_ONCE = 1 << 19
_EXACT = {F32: torch.float32, BF16: torch.bfloat16}


class GgufSource:
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._placed = hugging_face_names(header, fields_of(header))
        self._files = {path: open_regular(path) for path in header.parts}

    def __contains__(self, name: str) -> bool:
        return name in self._placed

    def __len__(self) -> int:
        return len(self._placed)

    def names(self) -> list[str]:
        return list(self._placed)

    def place(self, name: str) -> str:
        return f"{self._placed[name].info.path}: {self._placed[name].info.name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._placed[name].info.shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        placed = self._placed[name]
        out = torch.empty(placed.info.shape, dtype=dtype)
        flat = out.view(-1)
        for first, raw in self._parts(name):
            with np.errstate(invalid="ignore", over="ignore"):  # the values are checked once read
                found = dequantise(placed.info.type, raw)
            if placed.offset:
                found = found - np.float32(placed.offset)
            flat[first : first + len(found)] = torch.from_numpy(found)
        return _in_halves(out, placed.heads) if placed.heads else out

    @property
    def format(self) -> str:
        """The block type that most values have, or nothing."""
        largest = max(self._placed.values(), key=_values)
        return type_name(largest.info.type) if has_codes(largest.info.type) else ""

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        placed = self._placed[name]
        kind, shape = placed.info.type, placed.info.shape
        if not has_codes(kind) or len(shape) != 2 or placed.offset:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            parts = [codes_of(kind, raw) for _, raw in self._parts(name)]
        found = _joined(parts, kind, shape)
        if not placed.heads:
            return found
        return found.rows(_in_halves(torch.arange(shape[0]), placed.heads))

    def _parts(self, name: str) -> Iterator[tuple[int, Array]]:
        """(number of the first value, bytes of whole blocks), in order."""
        info = self._placed[name].info
        values, size = BLOCKS[info.type]
        count, step = math.prod(info.shape), _VALUES_AT_ONCE // values * values
        file = self._files[info.path]
        file.seek(info.start)
        for first in range(0, count, step):
            last = min(first + step, count)
            raw = np.fromfile(file, np.uint8, (last - first) // values * size)
            if len(raw) * values != (last - first) * size:
                raise CheckpointError(
                    f"{self.place(name)} cannot be read: the file was cut off while it was read. "
                    "Replace a model's files by rename, never in place"
                )
            yield first, raw

    def stored_dtype(self) -> torch.dtype:
        """Quantised values count as float16, the type of their factors."""
        largest = max(self._placed.values(), key=_values)
        return _EXACT.get(largest.info.type, torch.float16)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _values(placed: Placed) -> int:
    return math.prod(placed.info.shape)


def _in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from neighbours that are rotated together back to halves."""
    if tensor.shape[0] % (2 * heads):
        return tensor  # refused by its shape
    apart = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return apart.transpose(1, 2).reshape(tensor.shape)


# Types whose codes fit four bits, and the code that stands for 0 there; the others take eight.
_FOUR_BITS = {Q4_0: 8, Q4_1: 0, Q2_K: 0, Q3_K: 8, Q4_K: 0}
_ZERO_OF_EIGHT = 128


def _joined(parts: list[BlockCodes], kind: int, shape: tuple[int, ...]) -> Codes:
    zero = _FOUR_BITS.get(kind, _ZERO_OF_EIGHT)
    signed = np.concatenate([part.codes for part in parts])
    minima = [part.minima for part in parts if part.minima is not None]
    scales = np.concatenate([part.scales for part in parts])
    return Codes(
        codes=torch.from_numpy((signed.view(np.uint8) + np.uint8(zero)).reshape(shape)),
        scales=torch.from_numpy(scales.reshape(shape[0], -1)),
        minima=torch.from_numpy(np.concatenate(minima).reshape(shape[0], -1)) if minima else None,
        bits=4 if kind in _FOUR_BITS else 8,
        group=signed.shape[1] // scales.shape[1],
        zero=zero,
    )
