"""One safetensors file, read and not mapped: a mapped file that is cut off while a model is served
ends the process.

Layout: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from engine.errors import CheckpointError
from engine.regular_files import open_regular

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 16
_LENGTH_BYTES = 8
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes, from the file's beginning
    bytes: int


class SafetensorsFile:
    """Methods raise CheckpointError, naming the file and the tensor. The caller closes it."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that is not whole, or not a regular one."""
        self.path = path
        self._file: BufferedReader | None = None  # opened at the first read
        try:
            with open_regular(path) as file:
                self._identity = _identity(file)
                self._stored = self._header(file)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        """By its name in the format: F32, BF16, ..."""
        return self._stored[name].dtype

    def read(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return self._values(name, stored.start, stored.shape)

    def part(self, name: str, number: int) -> torch.Tensor:
        """One entry of the tensor's first dimension."""
        stored = self._stored[name]
        if not 0 <= number < (stored.shape[0] if stored.shape else 0):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(stored.shape)}, and no entry {number}"
            )
        each = stored.bytes // stored.shape[0]
        return self._values(name, stored.start + number * each, stored.shape[1:])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _values(self, name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        kind = self._stored[name].dtype
        if kind not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {kind}: use {', '.join(_DTYPES)}"
            )
        tensor = torch.empty(shape, dtype=_DTYPES[kind])
        if tensor.numel():
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            try:
                file = self._opened()
                file.seek(start)
                while view and (count := file.readinto(view)):
                    view = view[count:]
            except OSError as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from None
            if view:
                raise CheckpointError(
                    f"{self.path}: {name} cannot be read: the file was cut off while it was read. "
                    "Replace a model's files by rename, never in place"
                )
        return tensor

    def _opened(self) -> BufferedReader:
        if self._file is None:
            self._file = open_regular(self.path)
            if _identity(self._file) != self._identity:
                raise CheckpointError(
                    f"{self.path} changed while it was loaded: load it again, and replace a model's "
                    "files by rename, never in place"
                )
        return self._file

    def _header(self, file: BufferedReader) -> dict[str, _Stored]:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise self._broken(f"its header ends at byte {length + _LENGTH_BYTES}, of {size}")
        text = file.read(length)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise self._broken("its header is not a JSON object")
        about = content.pop("__metadata__", None) or {}
        if not isinstance(about, dict):
            raise self._broken("its __metadata__ is not a JSON object")
        self.metadata: dict[str, str] = about
        found = {name: self._entry(name, each) for name, each in content.items()}
        end = 0  # tensors lie one after the other, in some order, and fill the file
        for name, each in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
            if each.start != end:
                raise self._broken(f"tensor {name} starts at {each.start} and not at {end}")
            end += each.bytes
        first = _LENGTH_BYTES + length
        if first + end != size:
            raise self._broken(f"its tensors end at byte {first + end}, the file at {size}")
        return {
            name: _Stored(each.dtype, each.shape, first + each.start, each.bytes)
            for name, each in found.items()
        }

    def _entry(self, name: str, entry: Any) -> _Stored:
        """With `start` counted from the end of the header."""
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise self._broken(f"tensor {name!r:.200} lacks dtype, shape or data_offsets") from None
        sizes = [*shape, start, end] if isinstance(shape, list) else [None]
        if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
            raise self._broken(f"tensor {name!r:.200} has a dtype, shape or offset that cannot be")
        if len(shape) > _MOST_DIMENSIONS:
            raise self._broken(f"tensor {name!r:.200} has {len(shape)} dimensions")
        count = math.prod(shape)
        if dtype in _DTYPES and end - start != count * _DTYPES[dtype].itemsize:
            raise self._broken(
                f"tensor {name!r:.200} has shape {shape} of {dtype}, in {end - start} bytes"
            )
        if end < start:
            raise self._broken(f"tensor {name!r:.200} ends before it starts")
        return _Stored(dtype, tuple(shape), start, end - start)

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a complete safetensors file: {why}")


def _identity(file: BufferedReader) -> tuple[int, ...]:
    """Of the file and its content, as far as its times tell."""
    info = os.fstat(file.fileno())
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
