"""Reads the little-endian values of a GGUF header, each checked against the file's end.

Nothing is allocated for a count before the file is known to be long enough to hold that many.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.errors import CheckpointError

_STRING, _ARRAY = 8, 9
# Value types by their number in the file, as NumPy knows them.
_NUMBERS: dict[int, "np.dtype[Any]"] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# Larger than any published tokenizer has; a Python string takes far more memory than its bytes.
_MOST_STRINGS = 1 << 22


class Cursor:
    """A position in the header. Every method raises CheckpointError where the file is too short."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.at = 0
        self._file = file
        self.size = file.seek(0, 2)
        file.seek(0)

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def bytes(self, count: int, what: str) -> bytes:
        self._check(count, what)
        found = self._file.read(count)
        if len(found) != count:
            raise self.fail(f"{what} cannot be read: the file was cut off while it was read")
        self.at += count
        return found

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.bytes(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.bytes(8, what))[0])

    def count(self, what: str, smallest: int) -> int:
        """A number of items that take at least `smallest` bytes each."""
        count = self.u64(what)
        if count > (self.size - self.at) // smallest:
            raise self.fail(f"{what} is {count}: a file of {self.size} bytes cannot hold as many")
        return count

    def text(self, what: str) -> str:
        raw = self.bytes(self.count(f"the length of {what}", 1), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, what: str) -> Any:
        """A metadata value: a number, a bool, a string, a list of strings or a NumPy array."""
        kind = self.u32(f"the type of {what}")
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._numbers(kind, 1, what)[0].item()

    def _array(self, what: str) -> Any:
        kind = self.u32(f"the element type of {what}")
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no supported model uses")
        if kind != _STRING:
            number = self._number(kind, what)
            return self._numbers(kind, self.count(f"the length of {what}", number.itemsize), what)
        count = self.count(f"the length of {what}", 8)
        if count > _MOST_STRINGS:
            raise self.fail(f"{what} has {count} strings: at most {_MOST_STRINGS} are read")
        read: Callable[[str], str] = self.text
        return [read(what) for _ in range(count)]

    def _number(self, kind: int, what: str) -> "np.dtype[Any]":
        if kind not in _NUMBERS:
            raise self.fail(f"{what} has value type {kind}, which GGUF does not define")
        return _NUMBERS[kind]

    def _numbers(self, kind: int, count: int, what: str) -> "np.ndarray[Any, Any]":
        number = self._number(kind, what)
        return np.frombuffer(self.bytes(count * number.itemsize, what), number)

    def _check(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fail(
                f"{what} takes {count} bytes from byte {self.at}, but the file ends at "
                f"{self.size}: it is cut off or not whole"
            )
