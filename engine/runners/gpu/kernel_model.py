"""A loaded decoder on a GPU: its memory, and the operations that each step runs it with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.gpu.adapters.adapter_pages import AdapterTable
from engine.backends.gpu.altup.operations import StreamOperations
from engine.backends.gpu.attention_launch import Partials
from engine.backends.gpu.operations import Device, KernelOperations, SkinnyOperations
from engine.backends.gpu.pointwise_reference import Pairs
from engine.backends.gpu.skinny_launch import SkinnyTiles
from engine.backends.gpu.step import DeviceStep
from engine.backends.gpu.streams import side_stream
from engine.backends.layers.kv import KvPool
from engine.backends.layers.linear import DenseLinear
from engine.backends.layers.rotary import RotaryTables
from engine.model_spec import ModelSpec
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
        spec, device = decoder.spec, pool.data.device
        # By number of token rows: the tiles of steps that fuse norms, gate and sums into linears.
        self.fused_tiles: dict[int, SkinnyTiles] = {}
        self._decoder = decoder
        # Whether steps of few rows may fuse norms, gate and sums: into products with float weights.
        self.fusable = (
            all(isinstance(each, DenseLinear) for each in decoder.linears)
            and not any(block.mixture is not None for block in decoder.blocks)
            and spec.gated
            and not (spec.layer_norm or spec.parallel or spec.streams)
        )
        self._device = Device(
            spec=spec,
            caches=pool.layer_caches(),
            pieces=pool.kinds,
            arena=pool.arena,
            angles=[by_pair(each, spec).to(device) for each in angles],
            adapters=adapters,
            partials=partials,
            logits=torch.zeros(most_sampled, spec.vocab, dtype=pool.dtype, device=device),
            side=side_stream(device),
            pairs=pairs_of(spec),
            arrived=torch.zeros(spec.hidden, dtype=torch.int32, device=device),
        )

    def __call__(self, step: DeviceStep, last: Tensor) -> Tensor:
        """Logits [sampled, vocab] in the model's dtype, before `finish_logits`, valid until the
        next call. `last`: the last sampled token of every sequence row."""
        tiles, lora = self.fused_tiles.get(step.tokens.shape[0]), step.lora
        if self._device.spec.streams is not None:
            return self._decoder(StreamOperations(self._device, step, last))
        # DoRA's factors, and an adapter's own table or head, have launches of their own.
        if tiles is None or (lora is not None and (lora.rescaled or lora.ends)):
            return self._decoder(KernelOperations(self._device, step, last))
        return self._decoder(SkinnyOperations(self._device, step, last, tiles))


def pairs_of(spec: ModelSpec) -> Pairs:
    part = None if spec.interleaved or spec.rope.rotated is None else spec.rope.rotated // 2
    return Pairs(spec.interleaved, part)


def by_pair(tables: RotaryTables, spec: ModelSpec) -> Tensor:
    """[positions, head_dim] float32: the cosine of each pair of values, then the sines; with latent
    attention of the rotated values alone."""
    cos, sin, half = tables.cos.float(), tables.sin.float(), tables.cos.shape[1] // 2
    if spec.latent is not None:
        cos, sin = cos[:, -spec.rotary_dim :], sin[:, -spec.rotary_dim :]
    if tables.interleaved:
        return torch.cat((cos[:, ::2], sin[:, 1::2]), 1)
    if tables.part is not None:
        turned, still = tables.part // 2, half - tables.part // 2
        cos, sin = F.pad(cos[:, :turned], (0, still), value=1.0), sin[:, turned : 2 * turned]
        return torch.cat((cos, F.pad(sin, (0, still))), 1)
    return torch.cat((cos[:, :half], sin[:, half:]), 1)
