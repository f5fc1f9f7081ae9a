"""The host tier: checked adapters by digest, until they are dropped.

Which ones stay is decided by whoever registers and drops them; their ranks stay known.
"""

import time
from pathlib import Path
from threading import Lock

import torch

from engine.adapter_files import AdapterWeights, read_adapter
from engine.adapter_name import CONFIG, WEIGHTS
from engine.errors import AdapterError
from engine.models.spec import ModelSpec

# A file younger than this may be written again without its times showing it.
_SETTLED_NS = 2_000_000_000


class AdapterHost:
    """Safe to call from a loader thread while steps run."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, max_rank: int) -> None:
        self._spec = spec
        self._dtype = dtype
        self._max_rank = max_rank
        self._ranks: dict[str, int] = {}
        self._weights: dict[str, AdapterWeights] = {}
        self._checked: dict[
            Path, tuple[list[tuple[int, ...]], str]
        ] = {}  # files as they were, and the digest
        self._lock = Lock()

    def register(self, directory: Path) -> AdapterWeights:
        """Reads the adapter and checks it, its values only where the files are not those that were
        found whole before. Raises AdapterError."""
        files, began = _identity(directory), time.time_ns()
        checked, digest = self._checked.get(directory, (None, None))
        known = digest if files == checked else None
        weights = read_adapter(directory, self._spec, self._dtype, self._max_rank, known)
        if _identity(directory) != files:
            raise AdapterError("invalid_adapter", f"{directory} was changed while it was read")
        with self._lock:
            self._ranks[weights.digest] = weights.rank
            self._weights[weights.digest] = weights
            if began - max(files)[0] > _SETTLED_NS:
                self._checked[directory] = files, weights.digest
        return weights

    def rank(self, digest: str) -> int:
        """Known from the first registration on, also after the weights were dropped."""
        if digest not in self._ranks:
            raise _unknown(digest)
        return self._ranks[digest]

    def weights(self, digest: str) -> AdapterWeights:
        with self._lock:
            found = self._weights.get(digest)
        if found is None:
            raise _unknown(digest)
        return found

    def drop(self, digest: str) -> None:
        with self._lock:
            self._weights.pop(digest, None)


def _identity(directory: Path) -> list[tuple[int, ...]]:
    """What changes whenever either file is written, replaced or touched, times first."""
    found: list[tuple[int, ...]] = []
    for name in (CONFIG, WEIGHTS):
        try:
            told = (directory / name).stat()
        except OSError:
            return []  # the reader says which, and why
        found.append((told.st_ctime_ns, told.st_mtime_ns, told.st_size, told.st_dev, told.st_ino))
    return found


def _unknown(digest: str) -> AdapterError:
    return AdapterError(
        "adapter_not_found", f"adapter {digest[:12]} is not in host memory: register it first"
    )
