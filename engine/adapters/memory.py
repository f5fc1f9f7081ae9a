"""A device's adapters: verified copies in host memory, and the adapters loaded into its slots.

The caller decides which copies stay by registering and dropping them. The format of a copy, and
the layout of the weights in the blocks lent to it, depend on the device: `engine/runners/cpu/adapters.py`
on a CPU, `engine/runners/gpu/adapters.py` on a GPU.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import torch

from engine.adapters.files import AdapterWeights
from engine.adapters.reader import AdapterReader
from engine.adapters.sharded import part_of_adapter
from engine.batch import AdapterHandle
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.model_spec import ModelSpec
from engine.models.base_weights import BaseWeights
from engine.models.shares import Shard
from engine.protocol import AdapterState

HostCopy = TypeVar("HostCopy")


class AdapterMemory(ABC, Generic[HostCopy]):
    """`register` and `drop` may be called from a loader thread while steps run."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        dtype: torch.dtype,
        shard: Shard | None = None,
    ) -> None:
        """`shard`: the part of the model that this rank has, whose shape is `spec`."""
        self._spec = spec
        self._shard = shard
        self._dtype = dtype
        self._enabled = config.enable_lora
        self._reader = AdapterReader(
            BaseWeights(config.model, spec if shard is None else shard.whole),
            dtype,
            config.max_lora_rank,
        )
        self._copies: dict[str, HostCopy] = {}
        self._blocks_needed: dict[str, int] = {}  # by digest, like `_copies`
        self._loaded: list[AdapterHandle | None] = [None] * config.max_adapter_slots

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
        if self._shard is not None:
            weights = part_of_adapter(weights, self._shard)
        copy, self._blocks_needed[weights.digest] = self._prepare(weights)
        self._copies[weights.digest] = copy

    def drop(self, digest: str) -> None:
        self._copies.pop(digest, None)
        self._blocks_needed.pop(digest, None)

    def host_bytes(self, digest: str) -> int:
        """Host memory of a registered adapter's copy."""
        if digest not in self._copies:
            raise _unknown(digest)
        return self._bytes_of(self._copies[digest])

    def blocks(self, digest: str) -> int:
        if digest not in self._blocks_needed:
            raise _unknown(digest)
        return self._blocks_needed[digest]

    def load(self, handle: AdapterHandle, blocks: list[int]) -> None:
        copy = self._copies.get(handle.digest)
        if copy is None:
            raise _unknown(handle.digest)
        if self._loaded[handle.slot] is not None:
            raise IntegrityError(f"slot {handle.slot} still holds an adapter: unload it first")
        needed = self._blocks_needed[handle.digest]
        if len(blocks) < needed:
            raise IntegrityError(
                f"adapter {handle.digest[:12]} got {len(blocks)} of {needed} blocks"
            )
        self._store(handle.slot, copy, blocks[:needed])
        self._loaded[handle.slot] = handle

    def unload(self, handle: AdapterHandle) -> None:
        self.check(handle)
        self._clear(handle.slot)
        self._loaded[handle.slot] = None

    def check(self, handle: AdapterHandle) -> None:
        """Raises IntegrityError for a handle of another generation than the slot's."""
        if self._loaded[handle.slot] != handle:
            raise IntegrityError(
                f"slot {handle.slot} does not hold adapter {handle.digest[:12]} of generation "
                f"{handle.generation}: the step stops so that it cannot use other weights"
            )

    @abstractmethod
    def _prepare(self, weights: AdapterWeights) -> tuple[HostCopy, int]:
        """The host copy, and the number of blocks that it needs on the device. Raises ValueError
        when the adapter does not fit the device's layout."""

    @abstractmethod
    def _bytes_of(self, copy: HostCopy) -> int: ...

    @abstractmethod
    def _store(self, slot: int, copy: HostCopy, blocks: list[int]) -> None: ...

    @abstractmethod
    def _clear(self, slot: int) -> None: ...


def _unknown(digest: str) -> AdapterError:
    return AdapterError(
        "adapter_not_found", f"adapter {digest[:12]} is not in host memory: register it first"
    )
