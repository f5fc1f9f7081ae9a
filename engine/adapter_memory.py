"""A device's adapters: verified copies in host memory, and the adapters loaded into its slots.

The caller decides which copies stay by registering and dropping them. The format of a copy, and
the layout of the weights in the blocks lent to it, depend on the device: `layers/lora_slots.py`
on a CPU, `adapters_gpu.py` on a GPU.
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
    """`register` and `drop` may be called from a loader thread while steps run."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._enabled = config.enable_lora
        self._reader = AdapterReader(spec, dtype, config.max_lora_rank)
        self._copies: dict[str, Copy] = {}
        self._needed: dict[str, int] = {}  # digest -> blocks; kept after the copy is dropped
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
        """Stores a host copy of an adapter that is already read."""
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
            raise IntegrityError(
                f"adapter {handle.digest[:12]} got {len(blocks)} of {needed} blocks"
            )
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
                f"{handle.generation}: the step stops so that it cannot use other weights"
            )

    @abstractmethod
    def _made_ready(self, weights: AdapterWeights) -> tuple[Copy, int]:
        """The host copy, and the number of blocks that it needs on the device. Raises ValueError
        when the adapter does not fit the device's layout."""

    @abstractmethod
    def _fill(self, slot: int, copy: Copy, blocks: list[int]) -> None: ...

    @abstractmethod
    def _clear(self, slot: int) -> None: ...


def _unknown(digest: str) -> AdapterError:
    return AdapterError(
        "adapter_not_found", f"adapter {digest[:12]} is not in host memory: register it first"
    )
