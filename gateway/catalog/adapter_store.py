"""Stores uploaded adapters in the data directory, and reads adapters from directories that the
operator allows. Names in archives are never used as paths; pickle files are refused.
"""

import gzip
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from safetensors import SafetensorError, safe_open

from core.errors import BadRequest, Forbidden, PayloadTooLarge
from engine.lora.adapter_digest import CONFIG, WEIGHTS
from gateway.catalog.adapter_files import AdapterFiles, read_adapter

MAX_BYTES = 2 * 2**30  # of the weights, unpacked
MAX_CONFIG_BYTES = 2**20
_MAX_MEMBERS = 1_000
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CHUNK = 2**20
# Raised by the archive readers for truncated, encrypted or invalid files. (zipfile raises
# RuntimeError for a password and NotImplementedError for an unknown compression method.)
_ARCHIVE_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    NotImplementedError,
)


class AdapterStore:
    def __init__(self, root: Path, allowed: tuple[Path, ...]) -> None:
        """`root` holds uploads by tenant and digest; `allowed` is TOLLHOUSE_ADAPTER_DIRS."""
        self._root = root
        self._allowed = allowed

    def from_path(self, path: str) -> AdapterFiles:
        """Read an adapter below an allowed directory, after resolving links. Any other path raises
        the same Forbidden, which does not reveal whether the path exists."""
        directory = Path(path).resolve() if "\0" not in path else Path("/")
        for each in self._allowed:
            if directory.is_relative_to(each.resolve()) and directory.is_dir():
                return _validate(directory)
        raise Forbidden(
            "lora_path is not below a directory from which adapters may be loaded.",
            next_step="Upload the adapter, or ask the operator about TOLLHOUSE_ADAPTER_DIRS.",
            param="lora_path",
        )

    def from_archive(self, tenant_id: str, stream: IO[bytes]) -> AdapterFiles:
        """Unpack a tar (plain or gzip) or zip with an adapter in PEFT layout, at any depth."""
        with self._temporary_directory() as workdir:
            members = _zip_members if zipfile.is_zipfile(stream) else _tar_members
            stream.seek(0)
            try:
                _extract(members(stream), workdir)
            except _ARCHIVE_ERRORS:
                raise _invalid("the archive is not a complete tar or zip file") from None
            return self._store(tenant_id, workdir)

    def from_files(self, tenant_id: str, config: IO[bytes], weights: IO[bytes]) -> AdapterFiles:
        with self._temporary_directory() as workdir:
            _copy(config, workdir / CONFIG, MAX_CONFIG_BYTES)
            _copy(weights, workdir / WEIGHTS, MAX_BYTES)
            return self._store(tenant_id, workdir)

    def _store(self, tenant_id: str, workdir: Path) -> AdapterFiles:
        """Move the adapter to the directory named by its digest, unless that exists."""
        adapter = _validate(workdir)
        target_dir = self._root / tenant_id / adapter.digest
        if not target_dir.exists():
            target_dir.parent.mkdir(parents=True, exist_ok=True)
            workdir.rename(target_dir)
        return read_adapter(target_dir)

    @contextmanager
    def _temporary_directory(self) -> Iterator[Path]:
        self._root.mkdir(parents=True, exist_ok=True)
        workdir = Path(tempfile.mkdtemp(prefix=".upload-", dir=self._root))
        try:
            yield workdir
        finally:
            shutil.rmtree(workdir, ignore_errors=True)


def _validate(directory: Path) -> AdapterFiles:
    """Validate a directory. Weights are opened as safetensors; the engine checks shapes and values."""
    for file in directory.iterdir():
        _refuse_pickle(file.name)
    adapter = read_adapter(directory)
    try:
        with safe_open(directory / WEIGHTS, "numpy") as tensors:
            count = len(list(tensors.keys()))
    except (SafetensorError, OSError):
        raise _invalid(f"{WEIGHTS} is not a complete safetensors file") from None
    if not count:
        raise _invalid(f"{WEIGHTS} contains no tensors")
    return adapter


def _extract(members: Iterator[tuple[str, int, IO[bytes]]], workdir: Path) -> None:
    size_limits = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: MAX_BYTES}
    for number, (name, size, stream) in enumerate(members):
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or number >= _MAX_MEMBERS:
            raise _invalid(
                f"the archive's member {name[:80]!r} has an unsafe path or is one too many"
            )
        _refuse_pickle(path.name)
        if path.name not in size_limits:
            continue  # a tokenizer or a README, which is not stored
        if (workdir / path.name).exists():
            raise _invalid(f"the archive contains {path.name} twice")
        if size > size_limits[path.name]:
            raise _too_large(size_limits[path.name])
        _copy(stream, workdir / path.name, size_limits[path.name])


def _tar_members(stream: IO[bytes]) -> Iterator[tuple[str, int, IO[bytes]]]:
    mode: Literal["r|gz", "r|"] = "r|gz" if stream.read(2) == b"\x1f\x8b" else "r|"
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in archive:
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                raise _invalid(f"the archive's member {member.name[:80]!r} is a link or device")
            yield member.name, member.size, content


def _zip_members(stream: IO[bytes]) -> Iterator[tuple[str, int, IO[bytes]]]:
    with zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield member.filename, member.file_size, content


def _copy(source: IO[bytes], target: Path, max_bytes: int) -> None:
    """Copy at most `max_bytes` bytes. The size that an archive declares is not trusted."""
    written = 0
    with target.open("xb") as file:
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if written > max_bytes:
                raise _too_large(max_bytes)
            file.write(chunk)


def _refuse_pickle(name: str) -> None:
    if name.lower().endswith(_PICKLES):
        raise _invalid(f"{name[:80]!r} may be a pickle, which can run code when it is loaded")


def _invalid(problem: str) -> BadRequest:
    return BadRequest(
        f"The adapter is invalid: {problem}.",
        next_step=f"Send {CONFIG} and {WEIGHTS} as PEFT saves them.",
        param="file",
        code="invalid_adapter",
    )


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"A file of the adapter is larger than {max_bytes >> 20} MiB.",
        next_step="Use a lower rank.",
        param="file",
    )
