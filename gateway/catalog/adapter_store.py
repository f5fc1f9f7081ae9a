"""Stores uploaded adapters in the data directory, and reads adapters from directories that the
operator allows. Names in archives are never used as paths; pickle files are refused.

An upload stays in a directory of its own until it is accepted. Then `keep`, and likewise `discard`, hold
a lock on the tenant's files that all processes of the machine respect, so that what one upload gives up
is never what another one just registered.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import UnsupportedOperation
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

from core.errors import BadRequest, Forbidden, PayloadTooLarge
from engine.adapters.digest import CONFIG, WEIGHTS
from gateway.catalog import adapter_archive
from gateway.catalog.adapter_archive import (
    AdapterFiles,
    Refused,
    TooLarge,
    copy,
    read_adapter,
    refuse_pickle,
)

MAX_BYTES = 2 * 2**30  # of the weights, unpacked
MAX_CONFIG_BYTES = 2**20
_MAX_TENSORS_HEADER = 2**24  # bytes of the JSON that describes the tensors
_UNPACK_S = 300.0  # wall-clock limit of unpacking


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

    @contextmanager
    def from_archive(self, stream: IO[bytes]) -> Iterator[AdapterFiles]:
        """Unpack a tar (plain or gzip) or zip with an adapter in PEFT layout, at any depth. The files
        are gone afterwards, unless `keep` moved them."""
        with self._temporary_directory() as workdir:
            _unpack(stream, workdir)
            yield _validate(workdir)

    @contextmanager
    def from_files(self, config: IO[bytes], weights: IO[bytes]) -> Iterator[AdapterFiles]:
        """Like `from_archive`, of the two files of an adapter."""
        with self._temporary_directory() as workdir:
            try:
                copy(config, workdir / CONFIG, MAX_CONFIG_BYTES)
                copy(weights, workdir / WEIGHTS, MAX_BYTES)
            except TooLarge as error:
                raise _too_large(error.args[0]) from None
            yield _validate(workdir)

    def keep(self, tenant_id: str, files: AdapterFiles) -> AdapterFiles:
        """Move an upload to the directory named by its digest, unless that exists; files of a directory
        of the operator's stay where they are. Inside `locked`."""
        if not files.path.is_relative_to(self._root):
            return files
        target_dir = self._root / tenant_id / files.digest
        if not target_dir.exists():
            files.path.rename(target_dir)
        return read_adapter(target_dir)

    def stored_path(self, files: AdapterFiles) -> str:
        """As the database has it: of an upload below the data directory's folder, so that a copied
        directory works; of a directory of the operator's in full."""
        path, root = files.path.resolve(), self._root.resolve()
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def found_path(self, stored: str, tenant_id: str, digest: str) -> str:
        """Where the files are on this machine. A row of before has an upload's path in full, perhaps
        that of the directory from which this one was copied."""
        path = Path(stored)
        if path.is_absolute() and path.parts[-2:] == (tenant_id, digest):
            own = self._root.resolve() / tenant_id / digest
            return str(own if own.is_dir() else path)
        return str(self._root.resolve() / path)  # an absolute path stays as it is

    def discard(self, tenant_id: str, digest: str) -> None:
        """Delete kept files; those of a directory of the operator's stay. Inside `locked`."""
        shutil.rmtree(self._root / tenant_id / digest, ignore_errors=True)

    @contextmanager
    def locked(self, tenant_id: str) -> Iterator[None]:
        """No other thread or process of this machine keeps or discards files of the tenant meanwhile."""
        directory = self._root / tenant_id
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)  # which releases it

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
        try:
            refuse_pickle(file.name)
        except Refused as error:
            raise _invalid(str(error)) from None
    adapter = read_adapter(directory)
    _check_tensors_header(directory / WEIGHTS)
    try:
        with safe_open(directory / WEIGHTS, "numpy") as tensors:
            count = len(list(tensors.keys()))
    except (SafetensorError, OSError):
        raise _invalid(f"{WEIGHTS} is not a complete safetensors file") from None
    if not count:
        raise _invalid(f"{WEIGHTS} contains no tensors")
    return adapter


def _check_tensors_header(weights: Path) -> None:
    """The file begins with the length of its JSON header, in 8 bytes."""
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > _MAX_TENSORS_HEADER:
        raise _invalid(f"{WEIGHTS} is not a complete safetensors file")


def _unpack(stream: IO[bytes], workdir: Path) -> None:
    """In a process of its own, with limits on memory and time."""
    limits = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: MAX_BYTES}
    command = [sys.executable, "-m", adapter_archive.__name__, str(workdir), json.dumps(limits)]
    with _on_disk(stream) as file:
        try:
            ended = subprocess.run(
                command, stdin=file, capture_output=True, timeout=_UNPACK_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise _invalid(f"the archive could not be read in {_UNPACK_S:.0f} seconds") from None
    try:
        result = json.loads(ended.stdout)
    except ValueError:  # it was ended by its limits
        raise _invalid("the archive needs too much memory or time to be read") from None
    if "too_large" in result:
        raise _too_large(result["too_large"])
    if "problem" in result:
        raise _invalid(result["problem"])


@contextmanager
def _on_disk(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """The stream as a file with a descriptor. (Asked for one, a spooled file moves to the disk.)"""
    try:
        stream.fileno()
    except (UnsupportedOperation, AttributeError):
        with tempfile.TemporaryFile() as file:
            shutil.copyfileobj(stream, file)
            file.seek(0)
            yield file
    else:
        stream.flush()
        stream.seek(0)
        yield stream


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
