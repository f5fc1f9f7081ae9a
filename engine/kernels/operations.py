"""The operations of a step by the kernels, without host reads, so that a graph can capture them."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import lora_launch
from engine.kernels.adapter_pages import AdapterTable
from engine.kernels.attention_launch import Partials, paged_attention
from engine.kernels.pointwise_launch import gated, rms_norm, rotary
from engine.kernels.skinny_launch import SkinnyTiles, skinny_linear
from engine.kernels.step import DeviceStep
from engine.layers.embedding import Embedding
from engine.layers.experts import Mixture
from engine.layers.kv import KvPool
from engine.layers.linear import DenseLinear, Linear
from engine.layers.norm import RmsNorm
from engine.layers.operations import Attention, GatedSite, Site
from engine.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of a model that every step uses."""

    spec: ModelSpec
    pool: KvPool
    caches: tuple[Tensor, ...]  # the pool by layer
    angles: list[
        Tensor
    ]  # by number of the rope: [positions, head_dim] float32, cosines, then sines
    adapters: AdapterTable | None
    partials: Partials
    logits: Tensor  # [most sampled rows, vocab]: otherwise every graph would keep its own
    side: torch.cuda.Stream | None


@dataclass(slots=True)
class Residual:
    """A residual stream whose last summand is added by the kernel of the norm that reads it."""

    total: Tensor
    summand: Tensor | None = None


class KernelOperations:
    """Implements `engine.layers.operations.Operations` for any step."""

    def __init__(self, device: Device, step: DeviceStep, last: Tensor) -> None:
        """`last`: the last sampled token of every sequence row."""
        self._device = device
        self._step = step
        self._last = last

    def embed(self, table: Embedding, scale: float, norm: RmsNorm | None) -> Residual:
        if norm is not None:
            raise TypeError("the kernels have no norm of the embedding")
        raw = self._step.tokens.long()
        x = table(torch.where(raw < 0, self._last[(-1 - raw).clamp(min=0)], raw))
        if scale != 1.0:
            x *= scale
        return Residual(x)

    def project(self, site: Site, x: Residual, norm: RmsNorm | None) -> Tensor:
        return self._linear(site, self._normed(x, norm))

    def attend(self, attention: Attention, qkv: Tensor, x: Residual) -> tuple[Tensor, Residual]:
        device, step = self._device, self._step
        kv = device.caches[attention.layer]
        if attention.row_norms is not None:
            spec = device.spec
            rows = qkv.tensor_split((spec.q_width, spec.q_width + spec.kv_width), -1)
            for part, norm in zip(rows[:2], attention.row_norms, strict=True):
                part.copy_(rms_norm(part, norm))
        angles = None if attention.rope is None else device.angles[attention.rope]
        q = rotary(qkv, kv, step.rotary, angles, attention.head_norms)
        y = paged_attention(
            q, kv, step.attention, attention.shape, partials=device.partials, splits=step.splits
        )
        return y.view(y.shape[0], -1), x

    def gate(self, site: GatedSite, x: Residual, norm: RmsNorm | None) -> Tensor:
        y = self._linear(site, self._normed(x, norm))
        return gated(y, gelu=self._device.spec.activation != "silu")

    def add(self, site: Site, y: Tensor, x: Residual, norm: RmsNorm | None) -> Residual:
        y = self._linear(site, y)
        return Residual(x.total, y if norm is None else rms_norm(y, norm))

    def token_ids(self) -> Tensor:
        raise TypeError("the kernels have one residual stream")

    def widen(self, site: Site, x: Residual, norm: RmsNorm | None) -> Tensor:
        raise TypeError("the kernels have no MLP without a gate")

    def mix(self, mixture: Mixture, x: Residual, norm: RmsNorm | None) -> Residual:
        raise TypeError("the kernels have no mixture of experts")

    def logits(self, head: Linear, x: Residual, norm: RmsNorm) -> Tensor:
        h = self._normed(x, norm).index_select(0, self._step.sampled)
        return torch.mm(h, _dense(head).weight.t(), out=self._device.logits[: h.shape[0]])

    def _normed(self, x: Residual, norm: RmsNorm | None) -> Tensor:
        if norm is None:
            if x.summand is not None:
                x.total.add_(x.summand)
                x.summand = None
            return x.total
        if x.summand is None:
            return rms_norm(x.total, norm)
        summand, x.summand = x.summand, None
        return rms_norm(summand, norm, x.total)

    def _linear(self, site: Site, x: Tensor) -> Tensor:
        device, lora = self._device, self._step.lora
        if lora is None or device.adapters is None:
            return site.linear(x)
        pages = device.adapters.site(site.layer, site.name)
        arena = device.pool.data.view(-1)
        if lora_launch.fusable(pages, lora):
            y = site.linear(x)
            lora_launch.fused(y, x, arena, pages, lora)
            return y
        # The shrink needs only x: beside the base product it costs only its memory traffic.
        mid = lora_launch.shrink_buffer(x, pages, lora)
        if device.side is not None:
            device.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(device.side) if device.side is not None else nullcontext():
            lora_launch.shrink(x, arena, pages, lora, mid)
        y = site.linear(x)
        if device.side is not None:
            torch.cuda.current_stream().wait_stream(device.side)
        lora_launch.expand(y, mid, arena, pages, lora)
        return y


class SkinnyOperations(KernelOperations):
    """Half the launches for a handful of rows without adapters: norms, gate and sums are fused into
    the linears."""

    def __init__(self, device: Device, step: DeviceStep, last: Tensor, tiles: SkinnyTiles) -> None:
        super().__init__(device, step, last)
        self._tiles = tiles

    def project(self, site: Site, x: Residual, norm: RmsNorm | None) -> Tensor:
        linear = _dense(site.linear)
        return skinny_linear(x.total, linear.weight, self._tiles, bias=linear.bias, norm=norm)

    def gate(self, site: GatedSite, x: Residual, norm: RmsNorm | None) -> Tensor:
        linear = _dense(site.linear)
        gate = "silu" if self._device.spec.activation == "silu" else "gelu"
        return skinny_linear(
            x.total, linear.weight, self._tiles, bias=linear.bias, norm=norm, gate=gate
        )

    def add(self, site: Site, y: Tensor, x: Residual, norm: RmsNorm | None) -> Residual:
        linear = _dense(site.linear)
        if norm is None:
            skinny_linear(y, linear.weight, self._tiles, bias=linear.bias, add_to=x.total)
        else:
            y = skinny_linear(y, linear.weight, self._tiles, bias=linear.bias)
            x.total.add_(rms_norm(y, norm))
        return x

    def logits(self, head: Linear, x: Residual, norm: RmsNorm) -> Tensor:
        rows = x.total.index_select(0, self._step.sampled)
        out = self._device.logits[: rows.shape[0]]
        return skinny_linear(rows, _dense(head).weight, self._tiles, norm=norm, out=out)


def _dense(linear: Linear) -> DenseLinear:
    """The kernels read float weights; quantised ones are made dense when a GPU loads them."""
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"the kernels have no product for {type(linear).__name__}")
    return linear
