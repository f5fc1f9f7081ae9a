"""The paged KV memory: one pool of blocks, whose budget the KV cache and adapters share."""

import torch

from engine.layers.host_memory import lazy_zeros, release
from engine.layers.transfer import on_device
from engine.model_spec import ModelSpec


class KvPool:
    """Keys and values of all layers: [blocks, layers, 2 * kv heads, block size, head_dim].

    A block is one contiguous run of bytes over all layers. Key heads come first, then value heads,
    and a head's positions are contiguous, so that the blocks of a sequence are gathered directly
    into the shape that attention multiplies. On a CPU, memory is allocated when it is written.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = spec.layers, spec.kv_heads, spec.head_dim
        self.heads = 2 * spec.kv_heads  # key heads, then value heads
        self.group = spec.heads // spec.kv_heads  # query heads per key head
        self.block_size = block_size
        shape = (blocks, spec.layers, self.heads, block_size, spec.head_dim)
        self.data = (
            lazy_zeros(shape, dtype, huge=True)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        # Views of each layer, indexed with the numbers of layer 0. A row holds one head of a
        # block, a KV slot one head of a position.
        offsets = range(0, spec.layers * self.heads, self.heads)
        rows = self.data.view(-1, block_size * spec.head_dim)
        self.rows = [rows[first:] for first in offsets]
        kv_slots = self.data.view(-1, spec.head_dim)
        self._kv_slots = [kv_slots[first * block_size :] for first in offsets]

    def write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Stores kv [tokens, 2 * kv heads, head_dim] at `kv_slots` [tokens, 2 * kv heads]."""
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

    def lend(self, blocks: list[int]) -> None:
        """Returns the memory of blocks to the system, because adapters use as much elsewhere.

        On a CPU lent blocks stay unwritten, so cached keys and resident adapters together never
        use more memory than the pool's size.
        """
        if self.data.device.type == "cpu":
            for block in blocks:
                release(self.data[block])


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    return spec.layers * 2 * spec.kv_width * block_size * dtype.itemsize
