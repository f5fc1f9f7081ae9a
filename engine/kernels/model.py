"""Runs a loaded decoder with the kernels: the GPU counterpart of `engine.models.decoder`."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import lora_launch
from engine.kernels.adapter_pages import AdapterTable
from engine.kernels.attention_launch import Partials, paged_attention
from engine.kernels.pointwise_launch import gated, rms_norm, rotary
from engine.kernels.skinny_launch import SkinnyTiles, skinny_linear
from engine.kernels.step import DeviceStep
from engine.kernels.streams import side_stream
from engine.layers.kv import KvPool
from engine.layers.linear import Linear
from engine.layers.rotary import RotaryTables
from engine.models.decoder import Block, Decoder


class KernelModel:
    """The forward pass of a step, without host reads, so that a graph can capture it."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        angles: RotaryTables,
        adapters: AdapterTable | None,
        partials: Partials,
        most_sampled: int,
    ) -> None:
        half = decoder.spec.head_dim // 2
        device = pool.data.device
        # By number of token rows: the tiles of steps that fuse norms, gate and sums into linears.
        self.fused_tiles: dict[int, SkinnyTiles] = {}
        self._decoder = decoder
        self._spec = decoder.spec
        self._arena = pool.data.view(-1)
        self._caches = pool.data.unbind(1)
        self._angles = torch.cat((angles.cos[:, :half], angles.sin[:, half:]), 1).float().to(device)
        self._adapters = adapters
        self._partials = partials
        self._scale = float(torch.tensor(decoder.spec.embedding_scale, dtype=pool.data.dtype))
        # One buffer for all steps and graphs: otherwise every graph would keep its own logits.
        self._logits = pool.data.new_zeros(most_sampled, decoder.spec.vocab)
        self._side = side_stream(device)

    def __call__(self, step: DeviceStep, last: Tensor) -> Tensor:
        """Logits [sampled, vocab] in the model's dtype, before the soft cap, valid until the next
        call. `last`: the last sampled token of every sequence row."""
        decoder, spec = self._decoder, self._spec
        raw = step.tokens.long()
        tokens = torch.where(raw < 0, last[(-1 - raw).clamp(min=0)], raw)
        x = F.embedding(tokens, decoder.embedding)
        if spec.embedding_scale != 1.0:
            x *= self._scale
        out = self._logits[: step.sampled.shape[0]]
        tiles = self.fused_tiles.get(x.shape[0])
        if tiles is None or step.lora is not None:
            h = self._run_layers(x, step).index_select(0, step.sampled)
            return torch.mm(h, decoder.head.weight.t(), out=out)
        self._run_layers_fused(x, step, tiles)
        x = x.index_select(0, step.sampled)
        return skinny_linear(x, decoder.head.weight, tiles, norm=decoder.norm, out=out)

    def _run_layers(self, x: Tensor, step: DeviceStep) -> Tensor:
        """All layers and the final norm."""
        decoder = self._decoder
        h = rms_norm(x, decoder.blocks[0].input_norm)
        for i, block in enumerate(decoder.blocks):
            qkv = self._linear(block.layer, "qkv", block.qkv, h, step)
            y = self._linear(block.layer, "o", block.o, self._attention(block, qkv, step), step)
            if block.after_attention is not None:
                y = rms_norm(y, block.after_attention)
            h = rms_norm(y, block.mlp_norm, x)
            y = self._linear(block.layer, "gate_up", block.gate_up, h, step)
            y = gated(y, gelu=self._spec.activation != "silu")
            y = self._linear(block.layer, "down", block.down, y, step)
            if block.after_mlp is not None:
                y = rms_norm(y, block.after_mlp)
            last = i + 1 == self._spec.layers
            h = rms_norm(y, decoder.norm if last else decoder.blocks[i + 1].input_norm, x)
        return h

    def _run_layers_fused(self, x: Tensor, step: DeviceStep, tiles: SkinnyTiles) -> None:
        """All layers with half the launches, for a handful of rows without adapters; in place."""
        gate = "silu" if self._spec.activation == "silu" else "gelu"
        for block in self._decoder.blocks:
            qkv = skinny_linear(x, block.qkv.weight, tiles, block.qkv.bias, block.input_norm)
            y = self._attention(block, qkv, step)
            skinny_linear(y, block.o.weight, tiles, block.o.bias, add_to=x)
            y = skinny_linear(x, block.gate_up.weight, tiles, norm=block.mlp_norm, gate=gate)
            skinny_linear(y, block.down.weight, tiles, block.down.bias, add_to=x)

    def _attention(self, block: Block, qkv: Tensor, step: DeviceStep) -> Tensor:
        kv = self._caches[block.layer]
        q = rotary(qkv, kv, step.rotary, self._angles, block.head_norms)
        y = paged_attention(
            q, kv, step.attention, block.shape, partials=self._partials, splits=step.splits
        )
        return y.view(y.shape[0], -1)

    def _linear(self, layer: int, name: str, linear: Linear, x: Tensor, step: DeviceStep) -> Tensor:
        if step.lora is None or self._adapters is None:
            return linear(x)
        site = self._adapters.site(layer, name)
        if lora_launch.fusable(site, step.lora):
            y = linear(x)
            lora_launch.fused(y, x, self._arena, site, step.lora)
            return y
        # The shrink needs only x: beside the base product it costs only its memory traffic.
        mid = lora_launch.shrink_buffer(x, site, step.lora)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side) if self._side is not None else nullcontext():
            lora_launch.shrink(x, self._arena, site, step.lora, mid)
        y = linear(x)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        lora_launch.expand(y, mid, self._arena, site, step.lora)
        return y
