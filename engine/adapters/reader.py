"""Reads adapters, and remembers which files it has already verified."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.adapters.digest import CONFIG, WEIGHTS
from engine.adapters.files import AdapterWeights, read_adapter
from engine.errors import AdapterError
from engine.models.base_weights import BaseWeights

# A file younger than this may be written again without a change of its timestamps.
_SETTLED_NS = 2_000_000_000
_MOST_VERIFIED = 4096  # directories remembered; the oldest is then verified again


FileIdentity = list[tuple[int, ...]]


@dataclass(slots=True)
class AdapterReader:
    """Not thread-safe: one thread calls it, which need not be the one that runs the steps."""

    base: BaseWeights
    dtype: torch.dtype
    max_rank: int
    verified: dict[Path, tuple[FileIdentity, str]] = field(
        default_factory=dict
    )  # identity and digest

    def read(self, directory: Path) -> AdapterWeights:
        """Reads and checks an adapter. Values are not checked again while the files are unchanged
        since they were last verified. Raises AdapterError."""
        files, began = _file_identity(directory), time.time_ns()
        verified, digest = self.verified.get(directory, (None, None))
        known = digest if files == verified else None
        weights = read_adapter(directory, self.base, self.dtype, self.max_rank, known)
        if _file_identity(directory) != files:
            raise AdapterError("invalid_adapter", f"{directory} changed while read: load it again")
        if began - max(files)[0] > _SETTLED_NS:
            self.verified[directory] = files, weights.digest
            if len(self.verified) > _MOST_VERIFIED:
                del self.verified[next(iter(self.verified))]
        return weights


def _file_identity(directory: Path) -> FileIdentity:
    """Values that change whenever either file is written, replaced or touched; ctime first."""
    identity: FileIdentity = []
    for name in (CONFIG, WEIGHTS):
        try:
            info = (directory / name).stat()
        except OSError:
            return []  # `read_adapter` then raises with the file's name
        identity.append(
            (info.st_ctime_ns, info.st_mtime_ns, info.st_size, info.st_dev, info.st_ino)
        )
    return identity
