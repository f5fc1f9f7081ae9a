"""The paged KV memory: one pool of blocks, whose budget the KV cache and adapters share."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.backends.compiled.linear import DTYPES, has_kernel
from engine.backends.layers.host_memory import lazy_zeros, release
from engine.backends.layers.transfer import on_device, send
from engine.cache.parts import Windowed
from engine.model_spec import ModelSpec, Sight

SCALE_BYTES = 2  # of a head of a position whose keys or values are stored in 8 bits


class KvPool:
    """Keys and values of the layers that have their own: [blocks, layers, cached heads, block size,
    head_dim].

    A block is one contiguous run of bytes over all layers; with `windowed` those of layers with a
    window are a run of their own, in a slot of `parts`, or in other pages of `data`, if all memory is
    pages. Key heads come first, then value heads
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
        places = [(0, n) for n in range(layers)] if windowed is None else windowed.places(layers)
        # Of each layer: 0 if its keys and values are in the rest of blocks, otherwise in which piece of
        # a part, and where they lie in that.
        self.kinds, self._at = ([place[n] for place in places] for n in (0, 1))
        if windowed is None:
            self.data, self.parts = self._memory(blocks, layers), self._memory(0, 0)
        elif windowed.page:
            self.data = self.parts = self._memory(windowed.numbers, windowed.page)
        else:
            self.data = self._memory(windowed.numbers, windowed.rest)
            self.parts = self._memory(windowed.blocks, windowed.part)
        # Views of each layer, indexed with the numbers of the first layer of its kind. A row holds
        # one head of a block, a KV slot one head of a position.
        self.row_counts = [each.shape[1] * self.heads for each in (self.data, self.parts)]
        views = [
            each.view(-1, math.prod(each.shape[3:])) if each.numel() else each
            for each in (self.data, self.parts)
        ]
        self.rows = [views[min(kind, 1)][at * self.heads :] for kind, at in places]
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
        scales without the last dimension. A pool without parts in slots alone has them."""
        return [(layer, None) for layer in self._layers()]

    def _layers(self) -> list[torch.Tensor]:
        return [self.data[:, at] for at in self._at]

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
        if self.windowed is None:
            return self.bare_bytes
        pieces = self.windowed.part if self.windowed.page else 1
        return self.bare_bytes + pieces * self.parts[0].nbytes

    def in_parts(self, sight: Sight) -> bool:
        """Whether the layers that see this have their keys and values in parts."""
        return self.windowed is not None and self.windowed.covers(sight)

    def part_slots(self, blocks: list[int]) -> list[int]:
        """Where the parts of blocks lie; -1: they have none."""
        return [] if self.windowed is None else [self.windowed.slots[block] for block in blocks]

    def pieces(self, block: int) -> list[tuple[torch.Tensor, int]]:
        """The memory of a block and its number there, then those of its part, if it has one."""
        part = [] if self.windowed is None else self.windowed.part_of(block)
        return [(self.data, block), *((self.parts, number) for number in part)]

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
        """Copies blocks (from, to), and slots or pages of their parts."""
        for memory, each in ((self.data, pairs), (self.parts, parts)):
            if each:
                source, target = on_device(each, memory.device).unbind(1)
                memory[target] = memory[source]

    def clear(self, block: int, offset: int) -> None:
        """Zeroes a block's positions from `offset` on, in all layers.

        On a CPU attention multiplies whole blocks and masks the positions beyond the sequence. A
        mask does not stop the infinities and NaNs that another sequence may have left there.
        """
        for memory, number in self.pieces(block):
            self._clear(memory[number], offset)

    def _clear(self, heads: torch.Tensor, offset: int) -> None:
        """heads: [layers, cached heads, stored row]."""
        heads[:, :, offset:].zero_()

    def read(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        """The bytes of blocks, each before those of its part if it has one, copied in the order of the
        device's work; the function waits for it."""
        pieces = [self.pieces(block) for block in blocks]
        if self._device.type == "cpu":
            found = [
                b"".join(_bytes(memory)[number].numpy().tobytes() for memory, number in each)
                for each in pieces
            ]
            return lambda: found
        numbers = [number for each in pieces for _, number in each]
        host = torch.empty((len(numbers), self.bare_bytes), dtype=torch.uint8, pin_memory=True)
        host.copy_(_bytes(self.data)[on_device(numbers, self._device)], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> list[bytes]:
            done.synchronize()
            rows = iter(host)
            return [b"".join(next(rows).numpy().tobytes() for _ in each) for each in pieces]

        return wait

    def fill(self, blocks: list[int], data: list[bytes]) -> None:
        """The reverse of `read`: a block whose part was not there keeps what its own has."""
        if self._device.type == "cpu":
            for block, each in zip(blocks, data, strict=True):
                left = np.frombuffer(each, np.uint8)
                for memory, number in self.pieces(block):
                    piece = _bytes(memory)[number].numpy()
                    if len(left):
                        piece[:], left = left[: len(piece)], left[len(piece) :]
            return
        size = self.bare_bytes
        numbers = [
            number
            for block, each in zip(blocks, data, strict=True)
            for _, number in self.pieces(block)[: len(each) // size]
        ]
        host = torch.from_numpy(np.frombuffer(b"".join(data), np.uint8).reshape(-1, size).copy())
        _bytes(self.data)[on_device(numbers, self._device)] = send(host, self._device)

    def lend(self, blocks: list[int]) -> None:
        """Returns the memory of blocks to the system, because adapters use as much elsewhere.

        On a CPU lent blocks stay unwritten, so cached keys and resident adapters together never
        use more memory than the pool's size.
        """
        if self.data.device.type == "cpu":
            for memory, number in (piece for block in blocks for piece in self.pieces(block)):
                release(memory[number])

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
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: str = "auto",
    layers: int | None = None,
) -> int:
    """Bytes of a block of keys and values of so many layers that are stored in `kv_dtype`."""
    heads = (spec.cached_layers if layers is None else layers) * spec.cached_heads * block_size
    if kv_dtype == "auto":
        return heads * spec.head_dim * dtype.itemsize
    return heads * (spec.head_dim + SCALE_BYTES)
