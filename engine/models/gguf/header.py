"""A GGUF file's metadata and tensor table, versions 2 and 3.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.json_fields import shown
from engine.models.gguf.cursor import Cursor
from engine.models.gguf.parts import TENSORS, check_number, other_parts
from engine.models.gguf.types import BLOCKS, type_name
from engine.regular_files import open_regular

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_SMALLEST_VALUE = 8 + 4 + 1  # the length of its key, its type, one byte
_SMALLEST_TENSOR = 8 + 4 + 4 + 8  # the length of its name, its rank, its type, its offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is as torch has it, rows first; `start` counts from the beginning of the file `path`."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int
    path: Path

    @property
    def bytes(self) -> int:
        values, size = BLOCKS[self.type]
        return math.prod(self.shape) // values * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Of a model in several parts, the metadata of the first and the tensors of all."""

    path: Path
    parts: tuple[Path, ...]  # all files, `path` first
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """`path`: the file, or the first of a model's parts. Raises CheckpointError, naming the file and the
    field, for one that is not whole."""
    header = _read_file(path)
    others = other_parts(path, header.metadata)
    tensors = dict(header.tensors)
    for number, other in enumerate(others, 2):
        part = _read_file(other)
        check_number(other, part.metadata, number, len(others) + 1)
        for name, info in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{other}: tensor {name} is in another part, too")
            tensors[name] = info
    wanted = header.metadata.get(TENSORS, len(tensors))
    if others and (type(wanted) is not int or wanted != len(tensors)):
        raise CheckpointError(
            f"{path}: {TENSORS} is {shown(wanted)}, but its parts hold {len(tensors)} tensors"
        )
    return GgufHeader(path, (path, *others), header.metadata, tensors)


def _read_file(path: Path) -> GgufHeader:
    try:
        with open_regular(path) as file:
            if file.seek(0, 2) < len(_MAGIC) + 4:
                raise CheckpointError(f"{path}: it is too short to be a GGUF file")
            return _read(Cursor(path, file))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _read(cursor: Cursor) -> GgufHeader:
    _check_kind(cursor)
    tensor_count = cursor.count("the number of tensors", _SMALLEST_TENSOR)
    value_count = cursor.count("the number of metadata values", _SMALLEST_VALUE)
    metadata: dict[str, Any] = {}
    for number in range(value_count):
        key = cursor.text(f"metadata key {number}")
        if key in metadata:
            raise cursor.fail(f"metadata key {shown(key)} occurs twice")
        metadata[key] = cursor.value(key)
    infos = [_tensor(cursor, number) for number in range(tensor_count)]
    data_start = _aligned(cursor, metadata)
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name} occurs twice")
        placed = TensorInfo(info.name, info.shape, info.type, data_start + info.start, info.path)
        if placed.start + placed.bytes > cursor.size:
            raise cursor.fail(
                f"tensor {info.name} ends at byte {placed.start + placed.bytes}, but the file "
                f"at {cursor.size}: it is cut off or not whole"
            )
        tensors[info.name] = placed
    return GgufHeader(cursor.path, (cursor.path,), metadata, tensors)


def _check_kind(cursor: Cursor) -> None:
    magic = cursor.bytes(4, "the magic number")
    if magic != _MAGIC:
        raise cursor.fail(f"it starts with {magic!r}, not {_MAGIC!r}: it is not a GGUF file")
    version = cursor.u32("the version")
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise cursor.fail("it is big-endian: convert it to a little-endian GGUF file")
    raise cursor.fail(f"GGUF version is {version}: versions 2 and 3 are read")


def _tensor(cursor: Cursor, number: int) -> TensorInfo:
    """With `start` counted from the beginning of the data, as the file has it."""
    name = cursor.text(f"the name of tensor {number}")
    rank = cursor.u32(f"the rank of {name}")
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise cursor.fail(f"tensor {name} has {rank} dimensions: 1 to {_MOST_DIMENSIONS} are read")
    shape = tuple(cursor.u64(f"the shape of {name}") for _ in range(rank))[::-1]
    kind = cursor.u32(f"the type of {name}")
    start = cursor.u64(f"the offset of {name}")
    if kind not in BLOCKS:
        known = ", ".join(type_name(each) for each in BLOCKS)
        raise cursor.fail(f"tensor {name} is stored as {type_name(kind)}; supported: {known}")
    if min(shape) < 1 or shape[-1] % BLOCKS[kind][0]:
        raise cursor.fail(
            f"tensor {name} has shape {list(shape)}: {type_name(kind)} is stored in whole "
            f"blocks of {BLOCKS[kind][0]}"
        )
    return TensorInfo(name, shape, kind, start, cursor.path)


def _aligned(cursor: Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise cursor.fail(f"general.alignment is {shown(alignment)}: it must be a multiple of 8")
    return -(-cursor.at // alignment) * alignment
