"""A loaded decoder run by the kernels: the twin of `engine.models.decoder` for a GPU."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import lora_launch
from engine.kernels.adapter_pages import AdapterTable
from engine.kernels.attention_launch import Partials, paged_attention
from engine.kernels.attention_reference import AttentionShape
from engine.kernels.pointwise_launch import gated, rms_norm, rotary
from engine.kernels.pointwise_reference import HeadNorm
from engine.kernels.skinny_launch import InputNorm, SkinnyTiles, skinny_linear
from engine.kernels.step import DeviceStep
from engine.kernels.streams import side_stream
from engine.layers.kv import KvPool
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rotary import RotaryTables
from engine.models.decoder import Block, Decoder


class KernelModel:
    """One forward over a step; no host reads, so that it can be captured as a graph."""

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
        # By the number of token rows: steps whose linears take norms, gate and sums along.
        self.few_rows: dict[int, SkinnyTiles] = {}
        self._decoder = decoder
        self._spec = decoder.spec
        self._arena = pool.data.view(-1)
        kv_heads = decoder.spec.kv_heads
        self._caches = [(layer[:, :kv_heads], layer[:, kv_heads:]) for layer in pool.data.unbind(1)]
        self._angles = torch.cat((angles.cos[:, :half], angles.sin[:, half:]), 1).float().to(device)
        self._adapters = adapters
        self._partials = partials
        self._scale = float(torch.tensor(decoder.spec.embedding_scale, dtype=pool.data.dtype))
        # One for all steps and graphs: a graph of its own would keep its logits for ever.
        self._logits = pool.data.new_zeros(most_sampled, decoder.spec.vocab)
        self._side = side_stream(device)
        cap = decoder.spec.attention_cap or 0.0
        self._shapes = [
            AttentionShape(decoder.spec.query_scale, window or 0, cap)
            for window in decoder.spec.windows
        ]

    def __call__(self, step: DeviceStep, last: Tensor) -> Tensor:
        """Logits [sampled, vocab] in the model's type and not soft-capped, valid until the next
        call. `last` holds the last sampled token of every sequence row."""
        decoder, spec = self._decoder, self._spec
        raw = step.tokens.long()
        tokens = torch.where(raw < 0, last[(-1 - raw).clamp(min=0)], raw)
        x = F.embedding(tokens, decoder.embedding)
        if spec.embedding_scale != 1.0:
            x *= self._scale
        out = self._logits[: step.sampled.shape[0]]
        tiles = self.few_rows.get(x.shape[0])
        if tiles is None or step.lora is not None:
            h = self._through(x, step).index_select(0, step.sampled)
            return torch.mm(h, decoder.head.weight.t(), out=out)
        self._through_few_rows(x, step, tiles)
        norm = InputNorm(decoder.norm.weight, decoder.norm.eps)
        x = x.index_select(0, step.sampled)
        return skinny_linear(x, decoder.head.weight, tiles, norm=norm, out=out)

    def _through(self, x: Tensor, step: DeviceStep) -> Tensor:
        """All layers and the final norm."""
        decoder = self._decoder
        h = _norm(decoder.blocks[0].input_norm, x)
        for i, block in enumerate(decoder.blocks):
            qkv = self._linear(block.layer, "qkv", block.qkv, h, step)
            y = self._linear(block.layer, "o", block.o, self._attention(block, qkv, step), step)
            if block.after_attention is not None:
                y = _norm(block.after_attention, y)
            h = _norm(block.mlp_norm, y, x)
            y = self._linear(block.layer, "gate_up", block.gate_up, h, step)
            y = gated(y, gelu=self._spec.activation != "silu")
            y = self._linear(block.layer, "down", block.down, y, step)
            if block.after_mlp is not None:
                y = _norm(block.after_mlp, y)
            last = i + 1 == self._spec.layers
            h = _norm(decoder.norm if last else decoder.blocks[i + 1].input_norm, y, x)
        return h

    def _through_few_rows(self, x: Tensor, step: DeviceStep, tiles: SkinnyTiles) -> None:
        """All layers with half the launches, for a handful of rows without adapters; in place."""
        gate = "silu" if self._spec.activation == "silu" else "gelu"
        for block in self._decoder.blocks:
            norm = InputNorm(block.input_norm.weight, block.input_norm.eps)
            qkv = skinny_linear(x, block.qkv.weight, tiles, block.qkv.bias, norm)
            y = self._attention(block, qkv, step)
            skinny_linear(y, block.o.weight, tiles, block.o.bias, add_to=x)
            norm = InputNorm(block.mlp_norm.weight, block.mlp_norm.eps)
            y = skinny_linear(x, block.gate_up.weight, tiles, norm=norm, gate=gate)
            skinny_linear(y, block.down.weight, tiles, block.down.bias, add_to=x)

    def _attention(self, block: Block, qkv: Tensor, step: DeviceStep) -> Tensor:
        keys, values = self._caches[block.layer]
        norm = None
        if block.q_norm is not None and block.k_norm is not None:
            norm = HeadNorm(block.q_norm.weight, block.k_norm.weight, block.q_norm.eps)
        q = rotary(qkv, keys, values, step.rotary, self._angles, norm)
        y = paged_attention(
            q, keys, values, step.attention, self._shapes[block.layer],
            partials=self._partials, splits=step.splits,
        )  # fmt: skip
        return y.view(y.shape[0], -1)

    def _linear(self, layer: int, name: str, linear: Linear, x: Tensor, step: DeviceStep) -> Tensor:
        if step.lora is None or self._adapters is None:
            return linear(x)
        site = self._adapters.site(layer, name)
        if lora_launch.fusable(site, step.lora):
            y = linear(x)
            lora_launch.fused(y, x, self._arena, site, step.lora)
            return y
        # The shrink needs only x: beside the base product it costs its bytes and no more.
        mid = lora_launch.room(x, site, step.lora)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side) if self._side is not None else nullcontext():
            lora_launch.shrink(x, self._arena, site, step.lora, mid)
        y = linear(x)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        lora_launch.expand(y, mid, self._arena, site, step.lora)
        return y


def _norm(norm: RmsNorm, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps, residual)
