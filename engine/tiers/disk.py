"""The tier on a local disk: a file for each block, found again after a restart.

Files are written under another name and moved into place, so a file that a crash cut short is never read.
The time of a file is that of its last use.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError
from engine.tiers.recent import Recent

_PART = ".part"
_TOUCH_S = 60.0  # a file's time is written at most so often


class DiskTier:
    """Implements `engine.tiers.tier.Tier`."""

    label = "disk"
    listed = True

    def __init__(
        self, folder: Path, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        self._folder = folder
        self._clock = clock
        self._recent = Recent(max_bytes, ttl_s, clock)
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise ConfigError(
                f"tier_disk {folder}: {error.strerror}: name another folder"
            ) from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"tier_disk {folder} cannot be written: name another folder")

    def _scan(self) -> None:
        """Find the files of an earlier process; what exceeds the bounds is removed."""
        found = []
        for path in self._folder.glob("*/*/*"):
            if path.suffix == _PART:
                path.unlink(missing_ok=True)
                continue
            state = path.stat()
            found.append((state.st_mtime, state.st_size, str(path.relative_to(self._folder))))
        for used_at, size, name in sorted(found):
            for gone in self._recent.add(name, size, min(used_at, self._clock())):
                self._path(gone).unlink(missing_ok=True)

    def holds(self, name: str) -> bool:
        with self._lock:
            return name in self._recent

    def names(self) -> list[str]:
        with self._lock:
            return self._recent.names()

    def read(self, names: list[str]) -> list[bytes]:
        found: list[bytes] = []
        for name in names:
            with self._lock:
                if name not in self._recent:
                    break
            path = self._path(name)
            try:
                found.append(path.read_bytes())
                self._touch(name, path)
            except FileNotFoundError:
                self.discard(name)
                break
        return found

    def _touch(self, name: str, path: Path) -> None:
        with self._lock:
            self._recent.touch(name)
        with suppress(OSError):
            if self._clock() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path, (self._clock(), self._clock()))

    def write(self, name: str, data: bytes) -> list[str]:
        if len(data) > self._recent.max_bytes:
            return []
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(path.name + _PART)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            part.replace(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        with self._lock:
            gone = self._recent.add(name, len(data))
        for each in gone:
            self._path(each).unlink(missing_ok=True)
        return gone

    def erase(self, prefix: str) -> list[str]:
        with self._lock:
            gone = self._recent.under(prefix)
            for name in gone:
                self._recent.remove(name)
        shutil.rmtree(self._path(prefix.rstrip("/")), ignore_errors=True)
        return gone

    def discard(self, name: str) -> None:
        with self._lock:
            self._recent.remove(name)
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / name

    def close(self) -> None:
        pass
