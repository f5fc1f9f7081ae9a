"""A device's adapters: checked copies in host memory, and those whose weights lie in its slots.

Which copies stay is decided by whoever registers and drops them. How a copy is kept, and where in
the blocks lent to it the weights go, is the device's own affair: `layers/lora_slots.py` on a CPU,
`adapters_gpu.py` on a GPU.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import torch

from engine.adapter_files import AdapterWeights
from engine.adapter_reader import AdapterReader
from engine.batch import AdapterHandle
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.models.spec import ModelSpec
from engine.protocol import AdapterState

Copy = TypeVar("Copy")


class AdapterMemory(ABC, Generic[Copy]):
    """Safe to register and drop from a loader thread while steps run."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._enabled = config.enable_lora
        self._reader = AdapterReader(spec, dtype, config.max_lora_rank)
        self._copies: dict[str, Copy] = {}
        self._needed: dict[str, int] = {}  # blocks; known also after the copy was dropped
        self._held: list[AdapterHandle | None] = [None] * config.max_adapter_slots

    def register(self, path: str) -> AdapterState:
        """Reads and checks a PEFT directory into host memory. Raises AdapterError."""
        if not self._enabled:
            raise AdapterError("lora_disabled", "this engine was started with LoRA disabled")
        weights = self._reader.read(Path(path))
        try:
            self.keep(weights)
        except ValueError as error:
            raise AdapterError("invalid_adapter", f"{path}: {error}") from None
        return AdapterState(weights.digest, "host", weights.rank, 0)

    def keep(self, weights: AdapterWeights) -> None:
        """Takes an adapter that was read already into host memory."""
        copy, self._needed[weights.digest] = self._made_ready(weights)
        self._copies[weights.digest] = copy

    def drop(self, digest: str) -> None:
        self._copies.pop(digest, None)

    def blocks(self, digest: str) -> int:
        if digest not in self._needed:
            raise _unknown(digest)
        return self._needed[digest]

    def load(self, handle: AdapterHandle, blocks: list[int]) -> None:
        copy = self._copies.get(handle.digest)
        if copy is None:
            raise _unknown(handle.digest)
        if self._held[handle.slot] is not None:
            raise IntegrityError(f"slot {handle.slot} still holds an adapter: unload it first")
        needed = self._needed[handle.digest]
        if len(blocks) < needed:
            raise IntegrityError(f"adapter {handle.digest[:12]} was given {len(blocks)} blocks")
        self._fill(handle.slot, copy, blocks[:needed])
        self._held[handle.slot] = handle

    def unload(self, handle: AdapterHandle) -> None:
        self.check(handle)
        self._clear(handle.slot)
        self._held[handle.slot] = None

    def check(self, handle: AdapterHandle) -> None:
        """Raises IntegrityError for a handle of another generation than the slot's."""
        if self._held[handle.slot] != handle:
            raise IntegrityError(
                f"slot {handle.slot} does not hold adapter {handle.digest[:12]} of generation "
                f"{handle.generation}: the step stops rather than use other weights"
            )

    @abstractmethod
    def _made_ready(self, weights: AdapterWeights) -> tuple[Copy, int]:
        """The copy that stays in host memory, and how many blocks it needs on the device.
        ValueError says why it cannot be had."""

    @abstractmethod
    def _fill(self, slot: int, copy: Copy, blocks: list[int]) -> None: ...

    @abstractmethod
    def _clear(self, slot: int) -> None: ...


def _unknown(digest: str) -> AdapterError:
    return AdapterError(
        "adapter_not_found", f"adapter {digest[:12]} is not in host memory: register it first"
    )
