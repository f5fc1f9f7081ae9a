"""Reads adapters, and remembers which files it has already found whole."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.adapter_files import AdapterWeights, read_adapter
from engine.adapter_name import CONFIG, WEIGHTS
from engine.errors import AdapterError
from engine.models.spec import ModelSpec

# A file younger than this may be written again without its times showing it.
_SETTLED_NS = 2_000_000_000


Files = list[tuple[int, ...]]


@dataclass(slots=True)
class AdapterReader:
    """Called from one thread, be it another than the steps'."""

    spec: ModelSpec
    dtype: torch.dtype
    max_rank: int
    checked: dict[Path, tuple[Files, str]] = field(default_factory=dict)  # and the digest

    def read(self, directory: Path) -> AdapterWeights:
        """Checks the adapter too, its values only where the files are not those that were found
        whole before. Raises AdapterError."""
        files, began = _identity(directory), time.time_ns()
        checked, digest = self.checked.get(directory, (None, None))
        known = digest if files == checked else None
        weights = read_adapter(directory, self.spec, self.dtype, self.max_rank, known)
        if _identity(directory) != files:
            raise AdapterError("invalid_adapter", f"{directory} was changed while it was read")
        if began - max(files)[0] > _SETTLED_NS:
            self.checked[directory] = files, weights.digest
        return weights


def _identity(directory: Path) -> Files:
    """What changes whenever either file is written, replaced or touched, times first."""
    found: Files = []
    for name in (CONFIG, WEIGHTS):
        try:
            told = (directory / name).stat()
        except OSError:
            return []  # the reader says which, and why
        found.append((told.st_ctime_ns, told.st_mtime_ns, told.st_size, told.st_dev, told.st_ino))
    return found
