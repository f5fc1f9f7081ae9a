"""Adapters of a GPU: packed in host memory, copied into the KV blocks that were taken for them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.adapter_files import AdapterWeights
from engine.adapter_host import AdapterHost
from engine.batch import AdapterHandle, Row
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.kernels.adapter_pages import AdapterTable, PackedAdapter, pack_adapter
from engine.kernels.lora_chunks import chunk_rows_for, sort_into_chunks
from engine.kernels.step import HostStep, LoraRows
from engine.kernels.streams import side_stream
from engine.layers.kv import KvPool
from engine.layers.transfer import on_device
from engine.models.spec import ModelSpec
from engine.protocol import AdapterState

_COPIED_AT_ONCE = 64  # blocks staged on the device while they go to their places


class GpuAdapters:
    """Safe to register and drop from a loader thread while steps run."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, pool: KvPool
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._arena = pool.data.view(pool.data.shape[0], -1)
        self._host = AdapterHost(spec, dtype, config.max_lora_rank)
        self._packed: dict[str, PackedAdapter] = {}
        self._blocks: dict[str, int] = {}  # known also after the weights were dropped
        self._held: list[AdapterHandle | None] = [None] * config.max_adapter_slots
        self._ranks = [0] * config.max_adapter_slots
        self._sorted: tuple[object, LoraRows] | None = None
        device = pool.data.device
        self._copies = side_stream(device)
        self.table: AdapterTable | None = None
        self.rank_sizes: list[int] = []  # what a step's largest rank is rounded up to
        if config.enable_lora:
            most = -(-config.max_lora_rank // 16) * 16
            self.rank_sizes = sorted({16, most})
            self.table = AdapterTable(
                spec, config.max_adapter_slots, most, self._arena.shape[1], device
            )

    def register(self, path: str) -> AdapterState:
        """Reads, checks and packs a PEFT directory. Raises AdapterError."""
        if self.table is None:
            raise AdapterError("lora_disabled", "this engine was started with LoRA disabled")
        weights = self._host.register(Path(path))
        try:
            self.hold(weights)
        except ValueError as error:
            raise AdapterError("invalid_adapter", f"{path}: {error}") from None
        finally:
            self._host.drop(weights.digest)
        return AdapterState(weights.digest, "host", weights.rank, 0)

    def hold(self, weights: AdapterWeights) -> None:
        """Packs an adapter that was read already."""
        packed = pack_adapter(
            weights.matrices, self._spec.layers, self._arena.shape[1], self._dtype,
            pinned=self._copies is not None,
        )  # fmt: skip
        self._packed[weights.digest] = packed
        self._blocks[weights.digest] = packed.image.shape[0]

    def drop(self, digest: str) -> None:
        self._packed.pop(digest, None)

    def blocks(self, digest: str) -> int:
        if digest not in self._blocks:
            raise _unknown(digest)
        return self._blocks[digest]

    def load(self, handle: AdapterHandle, blocks: list[int]) -> None:
        packed = self._packed.get(handle.digest)
        if packed is None or self.table is None:
            raise _unknown(handle.digest)
        if self._held[handle.slot] is not None:
            raise IntegrityError(f"slot {handle.slot} still holds an adapter: unload it first")
        if len(blocks) < packed.image.shape[0]:
            raise IntegrityError(f"adapter {handle.digest[:12]} was given {len(blocks)} blocks")
        places = torch.tensor(blocks[: packed.image.shape[0]])
        self._copy_in(packed.image, places)
        self.table.fill(handle.slot, packed, places)
        self._held[handle.slot] = handle
        self._ranks[handle.slot] = int(packed.ranks.max())

    def unload(self, handle: AdapterHandle) -> None:
        self._check(handle)
        if self.table is not None:
            self.table.clear(handle.slot)
        self._held[handle.slot] = None

    def add_to(self, step: HostStep, rows: list[Row]) -> HostStep:
        """The step with its rows sorted by adapter, if any has one. Raises IntegrityError for a
        handle of another generation than the slot's."""
        handles = {row.adapter for row in rows if row.adapter is not None}
        if not handles:
            return step
        for handle in handles:
            self._check(handle)
        lengths = step.cu_q[1:] - step.cu_q[:-1]
        mapping = [
            (-1, 0) if row.adapter is None else (row.adapter.slot, row.adapter.generation)
            for row in rows
        ]
        key = (mapping, lengths.tolist())
        if self._sorted is None or self._sorted[0] != key:
            slots = torch.tensor([slot for slot, _ in mapping])
            by_token = torch.repeat_interleave(slots, torch.from_numpy(lengths))
            tokens = len(step.tokens)
            chunk_rows = chunk_rows_for(0 if tokens == step.decodes else tokens)
            order, chunks = sort_into_chunks(by_token, chunk_rows)
            most = max(self._ranks[handle.slot] for handle in handles)
            size = next(size for size in self.rank_sizes if size >= most)
            self._sorted = key, LoraRows(order.numpy(), chunks.numpy(), chunk_rows, size)
        return replace(step, lora=self._sorted[1])

    def _check(self, handle: AdapterHandle) -> None:
        if self._held[handle.slot] != handle:
            raise IntegrityError(
                f"slot {handle.slot} does not hold adapter {handle.digest[:12]} of generation "
                f"{handle.generation}: the step stops rather than use other weights"
            )

    def _copy_in(self, image: Tensor, places: Tensor) -> None:
        """Crosses to the device beside the step under way, and goes to its blocks after it."""
        device = self._arena.device
        index = on_device(places.tolist(), device)
        for first in range(0, image.shape[0], _COPIED_AT_ONCE):
            part = slice(first, first + _COPIED_AT_ONCE)
            with torch.cuda.stream(self._copies) if self._copies is not None else nullcontext():
                staged = image[part].to(device, non_blocking=True)
            if self._copies is not None:
                stream = torch.cuda.current_stream(device)
                stream.wait_stream(self._copies)
                staged.record_stream(stream)
            self._arena.index_copy_(0, index[part], staged)


def _unknown(digest: str) -> AdapterError:
    return AdapterError(
        "adapter_not_found", f"adapter {digest[:12]} is not in host memory: register it first"
    )
