"""Reads adapters, and remembers which files it has already verified."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.adapter_files import AdapterWeights, read_adapter
from engine.adapter_name import CONFIG, WEIGHTS
from engine.errors import AdapterError
from engine.models.spec import ModelSpec

# A file younger than this may be written again without a change of its timestamps.
_SETTLED_NS = 2_000_000_000


Files = list[tuple[int, ...]]


@dataclass(slots=True)
class AdapterReader:
    """Not thread-safe: one thread calls it, which need not be the one that runs the steps."""

    spec: ModelSpec
    dtype: torch.dtype
    max_rank: int
    checked: dict[Path, tuple[Files, str]] = field(default_factory=dict)  # identity and digest

    def read(self, directory: Path) -> AdapterWeights:
        """Reads and checks an adapter. Values are not checked again while the files are unchanged
        since they were last verified. Raises AdapterError."""
        files, began = _identity(directory), time.time_ns()
        checked, digest = self.checked.get(directory, (None, None))
        known = digest if files == checked else None
        weights = read_adapter(directory, self.spec, self.dtype, self.max_rank, known)
        if _identity(directory) != files:
            raise AdapterError("invalid_adapter", f"{directory} changed while read: load it again")
        if began - max(files)[0] > _SETTLED_NS:
            self.checked[directory] = files, weights.digest
        return weights


def _identity(directory: Path) -> Files:
    """Values that change whenever either file is written, replaced or touched; ctime first."""
    found: Files = []
    for name in (CONFIG, WEIGHTS):
        try:
            told = (directory / name).stat()
        except OSError:
            return []  # `read_adapter` then raises with the file's name
        found.append((told.st_ctime_ns, told.st_mtime_ns, told.st_size, told.st_dev, told.st_ino))
    return found
