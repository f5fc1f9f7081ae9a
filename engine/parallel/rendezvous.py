"""Where the ranks of a group meet on one host: a file that says what the group is, memory that they
share, and a socket on which each says who it is, answers, and is missed when it ends."""

import hashlib
import json
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.compiled.group import group_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError, RankError
from engine.parallel.ring import ring_bytes

VERSION = 1  # of this file and of the messages
_SHARED = Path("/dev/shm")  # a file system in memory
FILE = "group.json"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the file says. `settings` are those of EngineConfig."""

    version: int
    python: str
    size: int
    memory: str
    socket: str
    settings: dict[str, Any]

    @property
    def config(self) -> EngineConfig:
        given = dict(self.settings)
        given["public_prefixes"] = tuple(map(tuple, given["public_prefixes"]))
        return EngineConfig(**given)

    @property
    def digest(self) -> str:
        """Of version and settings, which all ranks have in common."""
        stated = [self.version, self.python, self.size, self.settings]
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def meeting(config: EngineConfig, folder: Path) -> Meeting:
    root = _SHARED if _SHARED.is_dir() else folder
    return Meeting(
        version=VERSION,
        python=sys.version.split()[0],
        size=config.tp,
        memory=str(root / f"tollhouse-{os.getpid()}-{secrets.token_hex(8)}"),
        socket=str(folder / "socket"),
        settings=asdict(config),
    )


def write(found: Meeting, folder: Path) -> Path:
    """The file appears whole. Only its owner reads it."""
    path, new = folder / FILE, folder / f"{FILE}.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(found), file)
    new.rename(path)
    return path


def read(path: Path) -> Meeting:
    """Raises RankError for a file of another version."""
    try:
        found = Meeting(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RankError(f"{path} does not say where ranks meet: {error}") from None
    own = VERSION, sys.version.split()[0]
    if (found.version, found.python) != own:
        raise RankError(
            f"the group has version {found.version} on Python {found.python}, this rank {own[0]} on "
            f"{own[1]}: start all ranks with the same installation"
        )
    return found


def make_memory(found: Meeting) -> NDArray[np.uint8]:
    """Zeros that processes share. Raises ConfigError where there is no room for them."""
    size = group_bytes(found.size) + ring_bytes()
    descriptor = os.open(found.memory, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return _mapped(descriptor, size)
    except OSError as error:
        os.unlink(found.memory)
        raise ConfigError(
            f"{Path(found.memory).parent} has no room for the {size >> 20} MiB that {found.size} ranks "
            f"share ({error.strerror}): mount more memory there"
        ) from None
    finally:
        os.close(descriptor)


def open_memory(found: Meeting) -> NDArray[np.uint8]:
    size = group_bytes(found.size) + ring_bytes()
    try:
        descriptor = os.open(found.memory, os.O_RDWR)
    except OSError as error:
        raise RankError(
            f"the memory of the group cannot be opened ({error.strerror}): it has ended"
        ) from None
    try:
        return _mapped(descriptor, size)
    finally:
        os.close(descriptor)


def divided(memory: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The memory of the group, and that of the ring."""
    first = group_bytes(size)
    return memory[:first], memory[first:]


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


def send(connection: socket.socket, record: dict[str, Any]) -> None:
    connection.sendall(json.dumps(record).encode() + b"\n")


def records(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Until the other end is gone."""
    with connection.makefile("rb") as lines:
        try:
            for line in lines:
                yield json.loads(line)
        except (OSError, ValueError):
            return
