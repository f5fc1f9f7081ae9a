"""The host tier: checked adapters by digest, until they are dropped.

Which ones stay is decided by whoever registers and drops them; their ranks stay known.
"""

from pathlib import Path
from threading import Lock

import torch

from engine.adapter_files import AdapterWeights, read_adapter
from engine.errors import AdapterError
from engine.models.spec import ModelSpec


class AdapterHost:
    """Safe to call from a loader thread while steps run."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, max_rank: int) -> None:
        self._spec = spec
        self._dtype = dtype
        self._max_rank = max_rank
        self._ranks: dict[str, int] = {}
        self._weights: dict[str, AdapterWeights] = {}
        self._lock = Lock()

    def register(self, directory: Path) -> AdapterWeights:
        """Reads and checks the whole adapter. Raises AdapterError."""
        weights = read_adapter(directory, self._spec, self._dtype, self._max_rank)
        with self._lock:
            self._ranks[weights.digest] = weights.rank
            self._weights[weights.digest] = weights
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


def _unknown(digest: str) -> AdapterError:
    return AdapterError(
        "adapter_not_found", f"adapter {digest[:12]} is not in host memory: register it first"
    )
