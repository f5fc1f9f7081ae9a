"""The operations of a step by the kernels, without host reads, so that a graph can capture them."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.adapters import lora_launch
from engine.backends.gpu.adapters.adapter_ends import Ends, change_logits, change_table
from engine.backends.gpu.adapters.adapter_pages import AdapterTable
from engine.backends.gpu.adapters.lora_reference import EndRows, LoraSite
from engine.backends.gpu.adapters.rescale_launch import rescale
from engine.backends.gpu.adapters.skinny_lora_launch import Change, change_of, link
from engine.backends.gpu.attention_launch import Partials, paged_attention
from engine.backends.gpu.formats.experts_launch import experts
from engine.backends.gpu.formats.launch import quantized_linear
from engine.backends.gpu.latent.attention import LatentStep
from engine.backends.gpu.pointwise_launch import activated, gated, rms_norm, rotary
from engine.backends.gpu.pointwise_reference import Pairs
from engine.backends.gpu.skinny_launch import Rotation, SkinnyTiles, skinny_linear
from engine.backends.gpu.step import DeviceStep
from engine.backends.layers.any_mixture import AnyMixture
from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.device.mixture import DeviceMixture
from engine.backends.layers.embedding import Embedding
from engine.backends.layers.experts import Mlp, SharedMlp
from engine.backends.layers.latent import LatentOutput, LatentQkv
from engine.backends.layers.linear import DenseLinear, Linear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Attention, GatedSite, Site, StreamSteps
from engine.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of a model that every step uses."""

    spec: ModelSpec
    caches: list[tuple[Tensor, Tensor | None]]  # by layer, with scales where they are codes
    pieces: list[int]  # by layer: that of a block in which its keys and values are (`KvPool.kinds`)
    arena: Tensor  # the memory of all blocks, in which adapters lie
    angles: list[
        Tensor
    ]  # by number of the rope: [positions, head_dim] float32, cosines, then sines
    adapters: AdapterTable | None
    partials: Partials
    logits: Tensor  # [most sampled rows, vocab]: otherwise every graph would keep its own
    side: torch.cuda.Stream | None
    pairs: Pairs  # of a head's values, as queries and keys are rotated
    arrived: Tensor  # [hidden] int32 zeros: counts the programs that share a tile's inputs


@dataclass(slots=True)
class Residual:
    """A residual stream whose last summand is added by the kernel of the norm that reads it."""

    total: Tensor
    summand: Tensor | None = None
    # The norm of `total` that attention has read, which a parallel MLP may read too.
    normed: tuple[RmsNorm, Tensor] | None = None
    # What adapters add to it, which the launch before the next product does.
    change: Change | None = None


class KernelOperations:
    """Implements `engine.backends.layers.operations.Operations` for any step."""

    def __init__(self, device: Device, step: DeviceStep, last: Tensor) -> None:
        """`last`: the last sampled token of every sequence row."""
        self._device = device
        self._step = step
        self._last = last

    def embed(self, table: Embedding, scale: float, norm: RmsNorm | None) -> Residual:
        raw = self._step.tokens.long()
        self.tokens = torch.where(raw < 0, self._last[(-1 - raw).clamp(min=0)], raw)
        x = self._own_table(self.tokens, table(self.tokens))
        if scale != 1.0:
            x *= scale
        return Residual(x if norm is None else rms_norm(x, norm))

    def project(self, site: Site, x: Residual, norm: RmsNorm | None) -> Tensor:
        h = self._normed(x, norm)
        if isinstance(site.linear, LatentQkv):
            device = self._device
            cache, table = device.caches[site.layer], device.angles[0]
            return self._latent(site.layer).queries(site.linear, h, self._step.rotary, table, cache)
        return self._linear(site, h)

    def _latent(self, layer: int) -> LatentStep:
        lora, adapters = self._step.lora, self._device.adapters
        absorbed = None
        if lora is not None and adapters is not None:
            absorbed = self._device.arena, adapters.site(layer, "kv_b"), lora

        def product(name: str, linear: Linear, x: Tensor) -> Tensor:
            return self._linear(Site(layer, name, linear), x)

        return LatentStep(product, absorbed)

    def _attend_latent(self, attention: Attention, q: Tensor) -> Tensor:
        """Over the queries, whose latent parts it takes the place of: [tokens, heads, latent]."""
        device, step, latent = self._device, self._step, self._device.spec.latent
        assert latent is not None
        kv, scales = device.caches[attention.layer]
        self._observe(attention, q)
        return paged_attention(
            q, kv, step.attention, attention.shape, scales=scales, rotated=latent.rotated,
            out=q[..., : latent.latent], partials=device.partials, splits=step.splits,
        )  # fmt: skip

    def attend(self, attention: Attention, qkv: Tensor, x: Residual) -> tuple[Tensor, Residual]:
        if self._device.spec.latent is not None:
            return self._attend_latent(attention, qkv), x
        return self._attended(attention, self._queries(attention, qkv)), x

    def _attended(self, attention: Attention, q: Tensor) -> Tensor:
        """Of queries as `_queries` gives them: [tokens, heads * dim]."""
        device, step = self._device, self._step
        kv, scales = device.caches[attention.source]
        self._observe(attention, q)
        # A mix leaves its padding alone: over the queries that is finite, in new memory it may not be.
        out = None if step.attention.mix is None else q
        y = paged_attention(
            q, kv, step.attention_of(device.pieces[attention.source]), attention.shape,
            scales=scales, sinks=attention.sinks,
            alibi=attention.alibi, out=out, partials=device.partials, splits=step.splits,
        )  # fmt: skip
        return y.view(y.shape[0], -1)

    def _observe(self, attention: Attention, q: Tensor) -> None:
        """Of prompts whose last queries say what their answers see, in all layers but the last."""
        if attention.layer < self._device.spec.layers - 1:
            for each in self._step.observed:
                each.add(q, *self._device.caches[attention.source], attention)

    def _queries(self, attention: Attention, qkv: Tensor) -> Tensor:
        """[tokens, heads, dim], rotated; keys and values, where the layer has any, are written to the
        cache."""
        device = self._device
        kv, scales = device.caches[attention.source]
        if device.spec.qkv_cap is not None:
            qkv.clamp_(-device.spec.qkv_cap, device.spec.qkv_cap)
        if attention.row_norms is not None:
            spec = device.spec
            rows = qkv.tensor_split((spec.q_width, spec.q_width + spec.kv_width), -1)
            for part, norm in zip(rows[:2], attention.row_norms, strict=True):
                part.copy_(rms_norm(part, norm))
        angles = None if attention.rope is None else device.angles[attention.rope]
        norms, own = attention.head_norms, attention.source == attention.layer
        step = self._step.rotary_of(device.pieces[attention.source] if own else 0)
        if norms is not None and attention.value_norm is not None:
            norms = *norms, attention.value_norm
        return rotary(qkv, kv, step, angles, norms, scales, pairs=device.pairs, stored=own)

    def gate(self, site: GatedSite, x: Residual, norm: RmsNorm | None) -> Tensor:
        y = self._linear(site, self._normed(x, norm))
        return gated(y, gelu=self._device.spec.activation != "silu")

    def add(self, site: Site, y: Tensor, x: Residual, norm: RmsNorm | None) -> Residual:
        if isinstance(site.linear, LatentOutput):
            y = self._latent(site.layer).output(site.linear, y)
        else:
            y = self._linear(site, y)
        if x.summand is not None:  # of attention, to which the MLP is parallel
            y.add_(x.summand)
        return Residual(x.total, y if norm is None else rms_norm(y, norm))

    def streams(self, x: Residual) -> StreamSteps[Residual]:
        raise TypeError("these operations have one residual stream")

    def widen(self, site: Site, x: Residual, norm: RmsNorm | None) -> Tensor:
        return activated(self._linear(site, self._normed(x, norm)), self._device.spec.activation)

    def mix(self, mixture: AnyMixture, x: Residual, norm: RmsNorm | None) -> Residual:
        assert isinstance(mixture, DeviceMixture)
        h, lora, changes, sites = self._normed(x, norm), self._step.lora, None, None
        table = None if self._device.adapters is None else self._device.adapters.experts
        if table is not None and lora is not None and lora.slots is not None:
            changes = table.changes(mixture.layer, self._device.arena, lora)
            sites = None if mixture.shared is None else table.shared(mixture.layer)
        real = self._step.rotary.slots >= 0
        y = experts(mixture, h, real, self._device.spec.activation, changes)
        if mixture.shared is not None:
            y.add_(self._shared(mixture.shared, h, sites))
        return Residual(x.total, y)

    def _shared(
        self, shared: Mlp | SharedMlp, x: Tensor, sites: tuple[LoraSite, LoraSite] | None
    ) -> Tensor:
        """`sites`: of adapters, if any changes it."""
        arena, lora = self._device.arena, self._step.lora
        mlp = shared if isinstance(shared, Mlp) else shared.mlp
        both = product(mlp.gate_up, x)
        if sites is not None and lora is not None:
            lora_launch.add_lora(both, x, arena, sites[0], lora)
        inner = gated(both, gelu=self._device.spec.activation != "silu")
        y = product(mlp.down, inner)
        if sites is not None and lora is not None:
            lora_launch.add_lora(y, inner, arena, sites[1], lora)
        if isinstance(shared, SharedMlp):
            y.mul_(torch.sigmoid(x.double() @ shared.gate.t()).to(x.dtype))
        return y

    def logits(self, head: Linear, x: Residual, norm: RmsNorm) -> Tensor:
        return self._head(head, self._normed(x, norm).index_select(0, self._step.sampled))

    def _head(self, head: Linear, h: Tensor) -> Tensor:
        out = self._device.logits[: h.shape[0]]
        if isinstance(head, DeviceLinear):
            return self._own_head(h, quantized_linear(h, head, out))
        return self._own_head(h, torch.mm(h, _dense(head).weight.t(), out=out))

    def _own_table(self, tokens: Tensor, x: Tensor) -> Tensor:
        """The rows of the tables of adapters that have one, in place of the base's."""
        for rows, ends in self._ends():
            if ends.table is not None and len(rows.tokens):
                ids, base = tokens[rows.tokens], x[rows.tokens]
                x[rows.tokens] = change_table(ends.table, self._device.arena, ids, base)
        return x

    def _own_head(self, h: Tensor, logits: Tensor) -> Tensor:
        """The logits by the heads of adapters that have one, in place of the base's."""
        for rows, ends in self._ends():
            if ends.head is not None and len(rows.sampled):
                found = h[rows.sampled], logits[rows.sampled]
                logits[rows.sampled] = change_logits(ends.head, self._device.arena, *found)
        return logits

    def _ends(self) -> Iterator[tuple[EndRows, Ends]]:
        lora, adapters = self._step.lora, self._device.adapters
        if lora is not None and adapters is not None:
            yield from ((rows, adapters.ends[rows.slot]) for rows in lora.ends)

    def _normed(self, x: Residual, norm: RmsNorm | None) -> Tensor:
        if norm is None:
            if x.summand is not None:
                x.total.add_(x.summand)
                x.summand = None
            return x.total
        if x.normed is not None and x.normed[0] is norm:
            return x.normed[1]
        if x.summand is None:
            h = rms_norm(x.total, norm)
        else:
            summand, x.summand = x.summand, None
            h = rms_norm(summand, norm, x.total)
        if self._device.spec.parallel:
            x.normed = norm, h
        return h

    def _linear(self, site: Site, x: Tensor) -> Tensor:
        device, lora = self._device, self._step.lora
        if lora is None or device.adapters is None:
            return product(site.linear, x)
        pages = device.adapters.site(site.layer, site.name)
        arena = device.arena
        lengths = device.adapters.rescale(site.layer, site.name) if lora.rescaled else None
        if lengths is not None or lora_launch.fusable(pages, lora):
            y = product(site.linear, x)
            if lengths is not None:  # before the adapters' sums, which have the factors in them
                rescale(y, arena, lengths, lora)
            lora_launch.add_lora(y, x, arena, pages, lora)
            return y
        # The shrink needs only x: in parallel with the base product it costs only its memory traffic.
        mid = lora_launch.shrink_buffer(x, pages, lora)
        if device.side is not None:
            device.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(device.side) if device.side is not None else nullcontext():
            lora_launch.shrink(x, arena, pages, lora, mid)
        y = product(site.linear, x)
        if device.side is not None:
            torch.cuda.current_stream().wait_stream(device.side)
        lora_launch.expand(y, mid, arena, pages, lora)
        return y


class SkinnyOperations(KernelOperations):
    """Half the launches for a handful of rows: norms, gate and sums are fused into the linears. So is
    what adapters add, but for one launch before each linear with a norm: it expands what the last one
    has shrunk, and shrinks for the next."""

    def __init__(self, device: Device, step: DeviceStep, last: Tensor, tiles: SkinnyTiles) -> None:
        super().__init__(device, step, last)
        self._tiles = tiles

    def project(self, site: Site, x: Residual, norm: RmsNorm | None) -> Tensor:
        linear, change = _dense(site.linear), self._shrunk(site, x, norm)
        return skinny_linear(
            x.total, linear.weight, self._tiles, bias=linear.bias, norm=norm, expand=change,
            rotate=self._rotation(site.layer),
        )  # fmt: skip

    def _rotation(self, layer: int) -> Rotation | None:
        """Of a layer whose product of queries, keys and values rotates and stores them, too: nothing
        stands between, such as norms of whole heads or the scales of codes."""
        device, spec = self._device, self._device.spec
        kv, scales = device.caches[layer]
        rope = spec.rope_of(layer)
        between = spec.head_norm or spec.row_norm or spec.qkv_cap is not None
        if rope is None or between or scales is not None or device.pairs != Pairs():
            return None
        return Rotation(self._step.rotary_of(device.pieces[layer]), device.angles[rope], kv)

    def _queries(self, attention: Attention, qkv: Tensor) -> Tensor:
        if self._rotation(attention.layer) is None:
            return super()._queries(attention, qkv)
        return qkv.view(qkv.shape[0], -1, self._device.spec.head_dim)

    def gate(self, site: GatedSite, x: Residual, norm: RmsNorm | None) -> Tensor:
        linear, change = _dense(site.linear), self._shrunk(site, x, norm)
        gate = "silu" if self._device.spec.activation == "silu" else "gelu"
        return skinny_linear(
            x.total,
            linear.weight,
            self._tiles,
            bias=linear.bias,
            norm=norm,
            gate=gate,
            expand=change,
        )

    def add(self, site: Site, y: Tensor, x: Residual, norm: RmsNorm | None) -> Residual:
        linear = _dense(site.linear)
        if norm is None:
            x.change = self._change(site)
            skinny_linear(
                y, linear.weight, self._tiles, bias=linear.bias, add_to=x.total, shrink=x.change,
                arrived=self._device.arrived,
            )  # fmt: skip
        else:  # the norm is of the whole product
            change = self._shrunk(site, Residual(y), None)
            y = skinny_linear(y, linear.weight, self._tiles, bias=linear.bias, expand=change)
            x.total.add_(rms_norm(y, norm))
        return x

    def _change(self, site: Site) -> Change | None:
        device, lora = self._device, self._step.lora
        if lora is None or device.adapters is None:
            return None
        return change_of(device.arena, device.adapters.site(site.layer, site.name), lora)

    def _shrunk(self, site: Site, x: Residual, norm: RmsNorm | None) -> Change | None:
        """What adapters add to the product of norm(x), its rows shrunk."""
        change = self._change(site)
        link(x.total, x.change, change, norm)
        x.change = None
        return change

    def logits(self, head: Linear, x: Residual, norm: RmsNorm) -> Tensor:
        link(x.total, x.change, None, None)
        rows = x.total.index_select(0, self._step.sampled)
        out = self._device.logits[: rows.shape[0]]
        return skinny_linear(rows, _dense(head).weight, self._tiles, norm=norm, out=out)


def product(linear: Linear, x: Tensor) -> Tensor:
    return quantized_linear(x, linear) if isinstance(linear, DeviceLinear) else linear(x)


def _dense(linear: Linear) -> DenseLinear:
    """A linear with float weights, which the kernels of few rows read."""
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"the kernels have no product for {type(linear).__name__}")
    return linear
