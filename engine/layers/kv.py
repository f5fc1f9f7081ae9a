"""The paged KV memory: one pool of blocks, whose budget the KV cache and adapters share."""

import math
from collections.abc import Callable

import numpy as np
import torch

from engine.layers.host_memory import lazy_zeros, release
from engine.layers.transfer import on_device, send
from engine.model_spec import ModelSpec

SCALE_BYTES = 2  # of a head of a position whose keys or values are stored in 8 bits


class KvPool:
    """Keys and values of the layers that have their own: [blocks, layers, cached heads, block size,
    head_dim].

    A block is one contiguous run of bytes over all layers. Key heads come first, then value heads
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
    ) -> None:
        self.dtype = dtype  # that attention reads
        self.layers, self.kv_heads = spec.cached_layers, spec.kv_heads
        self.head_dim = spec.head_dim
        self.heads = spec.cached_heads  # key heads, then value heads
        self.group = spec.heads // spec.kv_heads  # query heads per key head
        self.block_size = block_size
        row, stored = self._row()
        shape = (blocks, self.layers, self.heads, *row)
        self.data = (
            lazy_zeros(shape, stored, huge=True)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=stored, device=device)
        )
        # Views of each layer, indexed with the numbers of layer 0. A row holds one head of a
        # block, a KV slot one head of a position.
        rows = self.data.view(-1, math.prod(row))
        self.rows = [rows[first:] for first in range(0, self.layers * self.heads, self.heads)]
        self._kv_slots = self._slot_views()

    def _row(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and type in which one head of a block is stored."""
        return (self.block_size, self.head_dim), self.dtype

    def _slot_views(self) -> list[torch.Tensor]:
        return [rows.view(-1, self.head_dim) for rows in self.rows]

    @property
    def block_bytes(self) -> int:
        return self.data[0].nbytes

    def gather(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """These rows, numbered as in layer 0, in the type that attention reads:
        [rows, block size * head_dim]."""
        return self.rows[layer].index_select(0, rows)

    def write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Stores kv [tokens, cached heads, head_dim] at `kv_slots` [tokens, cached heads]."""
        self._kv_slots[layer].index_put_((kv_slots,), kv)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks (from, to)."""
        source, target = on_device(pairs, self.data.device).unbind(1)
        self.data[target] = self.data[source]

    def clear(self, block: int, offset: int) -> None:
        """Zeroes a block's positions from `offset` on, in all layers.

        On a CPU attention multiplies whole blocks and masks the positions beyond the sequence. A
        mask does not stop the infinities and NaNs that another sequence may have left there.
        """
        self.data[block, :, :, offset:].zero_()

    def read(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        """The bytes of blocks, copied in the order of the device's work; the function waits for it."""
        found = self._bytes()[on_device(blocks, self.data.device)]
        if found.device.type == "cpu":
            return lambda: [each.numpy().tobytes() for each in found]
        host = torch.empty(found.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(found, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> list[bytes]:
            done.synchronize()
            return [each.numpy().tobytes() for each in host]

        return wait

    def fill(self, blocks: list[int], data: list[bytes]) -> None:
        """The reverse of `read`."""
        own = self._bytes()
        if own.device.type == "cpu":
            for block, each in zip(blocks, data, strict=True):
                own[block].numpy()[:] = np.frombuffer(each, np.uint8)
            return
        host = torch.from_numpy(
            np.frombuffer(b"".join(data), np.uint8).reshape(len(data), -1).copy()
        )
        own[on_device(blocks, own.device)] = send(host, own.device)

    def _bytes(self) -> torch.Tensor:
        """[blocks, bytes of a block]"""
        return self.data.view(len(self.data), -1).view(torch.uint8)

    def lend(self, blocks: list[int]) -> None:
        """Returns the memory of blocks to the system, because adapters use as much elsewhere.

        On a CPU lent blocks stay unwritten, so cached keys and resident adapters together never
        use more memory than the pool's size.
        """
        if self.data.device.type == "cpu":
            for block in blocks:
                release(self.data[block])


def block_bytes(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, kv_dtype: str = "auto"
) -> int:
    """Bytes of a block of keys and values that are stored in `kv_dtype`."""
    heads = spec.cached_layers * spec.cached_heads * block_size
    if kv_dtype == "auto":
        return heads * spec.head_dim * dtype.itemsize
    return heads * (spec.head_dim + SCALE_BYTES)
