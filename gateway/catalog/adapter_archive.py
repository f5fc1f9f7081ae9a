"""Unpacks an adapter's archive in a process of its own, which may die of what it reads.

`python -m gateway.catalog.adapter_archive DIRECTORY LIMITS` reads a tar (plain or gzip) or zip from its
standard input. LIMITS is a JSON object of file names and their largest sizes: only these are written.
Address space, processor time and file sizes are limited. Names in archives are never used as paths.
It prints a JSON object: {} or the `problem`, or the `too_large` limit in bytes.
"""

import gzip
import json
import lzma
import resource
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from core.errors import BadRequest
from engine.adapters.digest import CONFIG, WEIGHTS, adapter_digest, read_config
from engine.adapters.peft.config import refuse_unserved
from engine.adapters.peft.shapes import check_shapes
from engine.errors import AdapterError
from engine.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    path: Path
    digest: str  # SHA-256 by which the engine identifies the adapter
    rank: int
    bytes: int
    unserved: str = ""  # why the built-in engine does not serve it; upstreams decide for themselves

    def check_served(self, spec: ModelSpec | None) -> None:
        """Raises BadRequest where the built-in engine does not serve it, or its tensors have not the
        shapes of its base model, if that is known."""
        if self.unserved:
            raise _invalid(self.unserved)
        if spec is None:
            return
        try:
            check_shapes(self.path, spec)
        except AdapterError as error:
            raise _invalid(error.message.replace(f"{self.path}/", "")) from None


def read_adapter(directory: Path) -> AdapterFiles:
    """Raises BadRequest, without paths of this machine, if the directory is not an adapter."""
    try:
        digest, config = adapter_digest(directory), read_config(directory)
    except AdapterError as error:
        raise _invalid(error.message.replace(f"{directory}/", "")) from None
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise _invalid(f"{CONFIG} says rank {rank!r}")
    size, unserved = (directory / WEIGHTS).stat().st_size, ""
    try:
        refuse_unserved(directory / CONFIG, config)
    except AdapterError as error:
        unserved = error.message.replace(f"{directory}/", "")
    return AdapterFiles(directory, digest, rank, size, unserved)


def _invalid(problem: str) -> BadRequest:
    return BadRequest(
        f"This is not a LoRA adapter: {problem}.",
        next_step="Name a directory in PEFT layout with safetensors weights.",
        param="lora_path",
        code="invalid_adapter",
    )


MAX_MEMORY = 2**29  # bytes of address space, the interpreter's own 100 MiB included
MAX_CPU_S = 120
MAX_MEMBERS = 1_000
MAX_HEADER = 2**16  # bytes of a long name or a PAX header, and of a zip's directory per 64 members
MAX_RATIO = 200  # bytes unpacked per byte of the archive, once there are _FREE
_FREE = 2**26
_CHUNK = 2**20
_BLOCK = 512
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_LONG_NAME, _PAX, _PAX_GLOBAL = b"L", b"x", b"g"
# Raised for truncated, encrypted or invalid files. (zipfile raises RuntimeError for a password and
# NotImplementedError for an unknown compression method.)
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    ValueError,
    struct.error,
)
Member = tuple[str, int, IO[bytes]]


class Refused(Exception):
    """`problem` completes "The adapter is invalid: …"."""


class TooLarge(Exception):
    """A file is larger than `args[0]` bytes."""


def unpack(stream: IO[bytes], directory: Path, limits: dict[str, int]) -> None:
    """Raises Refused, TooLarge, or MemoryError within the limits of the process."""
    size = stream.seek(0, 2)
    members = _zip_members if zipfile.is_zipfile(stream) else _tar_members
    stream.seek(0)
    try:
        _extract(members(stream, size), directory, limits)
    except _BROKEN:
        raise Refused("the archive is not a complete tar or zip file") from None


def _extract(members: Iterator[Member], directory: Path, limits: dict[str, int]) -> None:
    for number, (name, size, content) in enumerate(members):
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or number >= MAX_MEMBERS:
            raise Refused(
                f"the archive's member {name[:80]!r} has an unsafe path or is one too many"
            )
        refuse_pickle(path.name)
        if path.name not in limits:
            continue  # a tokenizer or a README, which is not stored
        if (directory / path.name).exists():
            raise Refused(f"the archive contains {path.name} twice")
        if size > limits[path.name]:
            raise TooLarge(limits[path.name])
        copy(content, directory / path.name, limits[path.name])


class _Bounded:
    """Reads a stream, and bounds what is unpacked from the archive's `size` bytes."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self._most = _FREE + MAX_RATIO * size
        self._read = 0

    def read(self, count: int = _CHUNK) -> bytes:
        data = self._stream.read(count)
        self._read += len(data)
        if self._read > self._most:
            raise Refused(f"the archive unpacks to more than {MAX_RATIO} times its size")
        return data


class _TarContent:
    """The content of one member, and what pads it to whole blocks."""

    def __init__(self, source: _Bounded, size: int) -> None:
        self._source = source
        self.left = size
        self._padding = -size % _BLOCK

    def read(self, count: int = _CHUNK) -> bytes:
        data = self._source.read(min(count, self.left))
        if not data and min(count, self.left):
            raise EOFError
        self.left -= len(data)
        return data

    def skip(self) -> None:
        while self.left:
            self.read()
        if len(self._source.read(self._padding)) < self._padding:
            raise EOFError


def _tar_members(stream: IO[bytes], size: int) -> Iterator[Member]:
    """Reads headers one by one. `tarfile` would read headers of any length into memory."""
    packed = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    source = _Bounded(gzip.GzipFile(fileobj=stream) if packed else stream, size)  # type: ignore[arg-type]
    long_name, entries = "", 0
    while True:
        block = source.read(_BLOCK)
        if len(block) < _BLOCK:
            raise EOFError
        if not block.strip(b"\0"):
            return
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        content = _TarContent(source, header.size)
        entries += 1
        if entries > 4 * MAX_MEMBERS or header.size < 0:
            raise Refused("the archive has too many entries")
        if header.type in (_LONG_NAME, _PAX, _PAX_GLOBAL):
            if header.size > MAX_HEADER:
                raise Refused(f"the archive has a header of more than {MAX_HEADER} bytes")
            text = b"".join(iter(content.read, b""))
            named = text.rstrip(b"\0").decode() if header.type == _LONG_NAME else _pax_name(text)
            long_name = named if header.type != _PAX_GLOBAL and named else long_name
        elif header.isreg():
            yield long_name or header.name, header.size, content  # type: ignore[misc]
            long_name = ""
        elif header.isdir():
            long_name = ""
        else:
            raise Refused(f"the archive's member {header.name[:80]!r} is a link or device")
        content.skip()


def _pax_name(text: bytes) -> str:
    """The `path` of records of the form "length key=value\\n"."""
    name = ""
    while text:
        length, _, _ = text.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(text):
            raise ValueError("a PAX record")
        key, _, value = text[len(length) + 1 : int(length) - 1].partition(b"=")
        if key in (b"size", b"GNU.sparse.realsize"):
            raise Refused("the archive has a file of more than 8 GiB, or a sparse one")
        if key == b"path":
            name = value.decode()
        text = text[int(length) :]
    return name


def _zip_members(stream: IO[bytes], size: int) -> Iterator[Member]:
    _check_directory(stream, size)
    with zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield member.filename, member.file_size, _Bounded(content, size)  # type: ignore[misc]


def _check_directory(stream: IO[bytes], size: int) -> None:
    """`zipfile` reads the whole directory into objects before the first member."""
    stream.seek(max(0, size - 66_000))
    tail = stream.read()
    at = tail.rfind(b"PK\5\6")
    entries, directory = struct.unpack_from("<HL", tail, at + 10)
    if b"PK\6\7" in tail[max(0, at - 20) : at] or entries > MAX_MEMBERS:
        raise Refused(f"the archive has more than {MAX_MEMBERS} members, or is in zip64 format")
    if directory > MAX_HEADER * 16:
        raise Refused(f"the archive has a directory of {directory} bytes")
    stream.seek(0)


def copy(source: IO[bytes], target: Path, max_bytes: int) -> None:
    """Copy at most `max_bytes` bytes. The size that an archive declares is not trusted."""
    written = 0
    with target.open("xb") as file:
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if written > max_bytes:
                raise TooLarge(max_bytes)
            file.write(chunk)


def refuse_pickle(name: str) -> None:
    if name.lower().endswith(_PICKLES):
        raise Refused(f"{name[:80]!r} may be a pickle, which can run code when it is loaded")


def main() -> None:
    directory, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    most = max(limits.values()) + _CHUNK
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    result: dict[str, object] = {}
    try:
        with open(0, "rb", closefd=False) as stream:
            unpack(stream, directory, limits)
    except Refused as error:
        result = {"problem": str(error)}
    except TooLarge as error:
        result = {"too_large": error.args[0]}
    except MemoryError:
        result = {"problem": "the archive needs too much memory to be read"}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
