"""A loaded decoder on a GPU: its memory, and the operations that each step runs it with."""

import torch
from torch import Tensor

from engine.kernels.adapter_pages import AdapterTable
from engine.kernels.attention_launch import Partials
from engine.kernels.operations import Device, KernelOperations, SkinnyOperations
from engine.kernels.skinny_launch import SkinnyTiles
from engine.kernels.step import DeviceStep
from engine.kernels.streams import side_stream
from engine.layers.kv import KvPool
from engine.layers.rotary import RotaryTables
from engine.models.decoder import Decoder


class KernelModel:
    """The forward pass of a step, without host reads, so that a graph can capture it."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        angles: list[RotaryTables],
        adapters: AdapterTable | None,
        partials: Partials,
        most_sampled: int,
    ) -> None:
        half, device = decoder.spec.head_dim // 2, pool.data.device
        # By number of token rows: the tiles of steps that fuse norms, gate and sums into linears.
        self.fused_tiles: dict[int, SkinnyTiles] = {}
        self._decoder = decoder
        self._device = Device(
            spec=decoder.spec,
            pool=pool,
            caches=pool.data.unbind(1),
            angles=[
                torch.cat((each.cos[:, :half], each.sin[:, half:]), 1).float().to(device)
                for each in angles
            ],
            adapters=adapters,
            partials=partials,
            logits=pool.data.new_zeros(most_sampled, decoder.spec.vocab),
            side=side_stream(device),
        )

    def __call__(self, step: DeviceStep, last: Tensor) -> Tensor:
        """Logits [sampled, vocab] in the model's dtype, before `finish_logits`, valid until the
        next call. `last`: the last sampled token of every sequence row."""
        tiles = self.fused_tiles.get(step.tokens.shape[0])
        if tiles is None or step.lora is not None:
            return self._decoder(KernelOperations(self._device, step, last))
        return self._decoder(SkinnyOperations(self._device, step, last, tiles))
