"""The paged KV memory: one pool of blocks, whose budget the KV cache and adapters share."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.cache.windowed import Windowed
from engine.dense.linear import DTYPES, has_kernel
from engine.layers.host_memory import lazy_zeros, release
from engine.layers.transfer import on_device, send
from engine.model_spec import ModelSpec, Sight

SCALE_BYTES = 2  # of a head of a position whose keys or values are stored in 8 bits


class KvPool:
    """Keys and values of the layers that have their own: [blocks, layers, cached heads, block size,
    head_dim].

    A block is one contiguous run of bytes over all layers; with `windowed` those of layers with a
    window are a run of their own, in a slot of `parts`. Key heads come first, then value heads
    (latent vectors are both), and a head's positions are contiguous, so that the blocks of a sequence
    are gathered directly into the shape that attention multiplies. On a CPU, memory is allocated when
    it is written.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windowed: Windowed | None = None,
    ) -> None:
        self.dtype = dtype  # that attention reads
        self.kv_heads = spec.kv_heads
        self.head_dim = spec.head_dim
        self.heads = spec.cached_heads  # key heads, then value heads
        self.group = spec.heads // spec.kv_heads  # query heads per key head
        self.block_size = block_size
        self.last_layer = spec.layers - 1
        self.windowed = windowed
        self._device = device
        layers = spec.cached_layers
        in_part = frozenset[int]() if windowed is None else windowed.layers
        # Of each layer: 1 if its keys and values are in parts, otherwise 0.
        self.kinds = [int(layer in in_part) for layer in range(layers)]
        self.data = self._memory(
            blocks if windowed is None else windowed.numbers, layers - len(in_part)
        )
        self.parts = self._memory(0 if windowed is None else windowed.blocks, len(in_part))
        # Views of each layer, indexed with the numbers of the first layer of its kind. A row holds
        # one head of a block, a KV slot one head of a position.
        self.row_counts = [each.shape[1] * self.heads for each in (self.data, self.parts)]
        views = [
            each.view(-1, math.prod(each.shape[3:])) if each.numel() else each
            for each in (self.data, self.parts)
        ]
        firsts = [0, 0]
        self.rows = []
        for kind in self.kinds:
            self.rows.append(views[kind][firsts[kind] :])
            firsts[kind] += self.heads
        self._kv_slots = self._slot_views()
        # Whether single queries read keys and values where they lie, and no copy has to fit into a cache.
        self.read_in_place = (
            has_kernel() and dtype in DTYPES and bool(self._kv_slots) and spec.alibi is None
        )

    def _memory(self, blocks: int, layers: int) -> torch.Tensor:
        row, stored = self._row()
        shape = (blocks, layers, self.heads, *row)
        if self._device.type != "cpu" or not math.prod(shape):
            return torch.zeros(shape, dtype=stored, device=self._device)
        return lazy_zeros(shape, stored, huge=True)

    def _row(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and type in which one head of a block is stored."""
        return (self.block_size, self.head_dim), self.dtype

    def _slot_views(self) -> list[torch.Tensor]:
        return [rows.view(-1, self.head_dim) for rows in self.rows]

    def layer_caches(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Of each layer [blocks, cached heads, block size, head_dim], floats or codes, and the codes'
        scales without the last dimension. A pool without parts alone has them."""
        return [(layer, None) for layer in self.data.unbind(1)]

    @property
    def arena(self) -> torch.Tensor:
        """All memory of the blocks as numbers of the type that attention reads, flat."""
        return self.data.view(-1).view(self.dtype)

    @property
    def bare_bytes(self) -> int:
        """Of a block without its part."""
        return self.data[0].nbytes

    @property
    def block_bytes(self) -> int:
        return self.bare_bytes + (0 if self.windowed is None else self.parts[0].nbytes)

    def in_parts(self, sight: Sight) -> bool:
        """Whether the layers that see this have their keys and values in parts."""
        return self.windowed is not None and self.windowed.covers(sight)

    def part_slots(self, blocks: list[int]) -> list[int]:
        """Where the parts of blocks lie; -1: they have none."""
        return [] if self.windowed is None else [self.windowed.slots[block] for block in blocks]

    def gather(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """These rows, numbered as in the first layer of its kind, in the type that attention reads:
        [rows, block size * head_dim]."""
        return self.rows[layer].index_select(0, rows)

    def paged(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that has these rows, numbered as in the first layer of its kind, in the type that
        attention reads, and their numbers there."""
        return self.rows[layer], rows

    def slots(self, layer: int) -> torch.Tensor | None:
        """The KV slots of a layer, indexed with those of the first layer of its kind,
        [slots, head_dim]; None where they are not stored as floats."""
        return self._kv_slots[layer] if self._kv_slots else None

    def write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Stores kv [tokens, cached heads, head_dim] at `kv_slots` [tokens, cached heads]."""
        self._kv_slots[layer].index_put_((kv_slots,), kv)

    def copy(self, pairs: list[tuple[int, int]], parts: Sequence[tuple[int, int]] = ()) -> None:
        """Copies blocks (from, to), and slots of their parts."""
        for memory, each in ((self.data, pairs), (self.parts, parts)):
            if each:
                source, target = on_device(each, memory.device).unbind(1)
                memory[target] = memory[source]

    def clear(self, block: int, offset: int) -> None:
        """Zeroes a block's positions from `offset` on, in all layers.

        On a CPU attention multiplies whole blocks and masks the positions beyond the sequence. A
        mask does not stop the infinities and NaNs that another sequence may have left there.
        """
        self._clear(self.data[block], offset)
        for slot in self.part_slots([block]):
            self._clear(self.parts[slot], offset)

    def _clear(self, heads: torch.Tensor, offset: int) -> None:
        """heads: [layers, cached heads, stored row]."""
        heads[:, :, offset:].zero_()

    def read(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        """The bytes of blocks, copied in the order of the device's work; the function waits for it."""
        if self._device.type == "cpu":
            found = [self._read(block) for block in blocks]
            return lambda: found
        host = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, pin_memory=True)
        host.copy_(_bytes(self.data)[on_device(blocks, self._device)], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> list[bytes]:
            done.synchronize()
            return [each.numpy().tobytes() for each in host]

        return wait

    def _read(self, block: int) -> bytes:
        """A block's bytes, then those of its part if it has one."""
        parts = b"".join(
            _bytes(self.parts)[s].numpy().tobytes() for s in self.part_slots([block]) if s >= 0
        )
        return _bytes(self.data)[block].numpy().tobytes() + parts

    def fill(self, blocks: list[int], data: list[bytes]) -> None:
        """The reverse of `read`."""
        if self._device.type == "cpu":
            for block, each in zip(blocks, data, strict=True):
                whole = np.frombuffer(each, np.uint8)
                _bytes(self.data)[block].numpy()[:] = whole[: self.bare_bytes]
                if len(whole) > self.bare_bytes:
                    _bytes(self.parts)[self.part_slots([block])[0]].numpy()[:] = whole[
                        self.bare_bytes :
                    ]
            return
        host = torch.from_numpy(
            np.frombuffer(b"".join(data), np.uint8).reshape(len(data), -1).copy()
        )
        _bytes(self.data)[on_device(blocks, self._device)] = send(host, self._device)

    def lend(self, blocks: list[int]) -> None:
        """Returns the memory of blocks to the system, because adapters use as much elsewhere.

        On a CPU lent blocks stay unwritten, so cached keys and resident adapters together never
        use more memory than the pool's size.
        """
        if self.data.device.type == "cpu":
            for block in blocks:
                release(self.data[block])
            for slot in self.part_slots(blocks):
                release(self.parts[slot])

    def cool(self) -> None:
        """Returns the memory of what the block pool has listed as cold to the system. Called before
        anything is written."""
        if self.windowed is None:
            return
        for memory, numbers in zip((self.parts, self.data), self.windowed.cold, strict=True):
            for number in numbers:
                release(memory[number])
            numbers.clear()


def _bytes(memory: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes of a block]"""
    return memory.view(len(memory), -1).view(torch.uint8)


def block_bytes(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, kv_dtype: str = "auto"
) -> int:
    """Bytes of a block of keys and values that are stored in `kv_dtype`."""
    heads = spec.cached_layers * spec.cached_heads * block_size
    if kv_dtype == "auto":
        return heads * spec.head_dim * dtype.itemsize
    return heads * (spec.head_dim + SCALE_BYTES)
