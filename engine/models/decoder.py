"""The decoder of all model families: embedding, blocks of attention and gated MLP, head."""

from collections.abc import Callable
from statistics import NormalDist
from typing import cast

import torch

from engine.backends.layers.alibi import Alibi, alibi
from engine.backends.layers.linear import Linear
from engine.backends.layers.matrices import MODULES, part_shape, sites_of
from engine.backends.layers.norm import LayerNorm, RmsNorm
from engine.backends.layers.operations import Attention, GatedSite, Halves, Operations, Site, X
from engine.model_spec import ModelSpec
from engine.models.experts import mixture
from engine.models.latent import latent_attention
from engine.models.linears import Matrix, embedding_and_head, gated_linear, linear
from engine.models.streams.decoder import Streams
from engine.models.tied_head import head_is_table
from engine.models.weights import Weights


class Block:
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Weights) -> None:
        prefix = f"{spec.root}.layers.{layer}"

        def site(name: str) -> Site:
            return Site(layer, name, linear(weights, _matrices(spec, layer, name)))

        self.parallel = spec.parallel
        if spec.latent is None:
            self.qkv, self.o = site("qkv"), site("o")
        else:
            pair = latent_attention(spec, spec.latent, f"{prefix}.self_attn", weights)
            self.qkv, self.o = Site(layer, "qkv", pair[0]), Site(layer, "o", pair[1])
        experts = spec.experts_of(layer)
        self.mixture = None if experts is None else mixture(spec, experts, layer, weights)
        if experts is None:
            self.gate_up = _inner_site(spec, layer, weights) if spec.gated else site("gate_up")
            self.down = site("down")

        def norm(name: str, *size: int) -> RmsNorm:
            return _norm(spec, weights, f"{prefix}.{name}.weight", size or (spec.hidden,))

        before, after = spec.norms_before, spec.norms_after
        mlp_norm = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        self.input_norm = norm("input_layernorm") if before else None
        if spec.parallel and not spec.parallel_norm:
            self.mlp_norm = self.input_norm
        else:
            self.mlp_norm = norm(mlp_norm) if before else None
        self.after_attention = norm("post_attention_layernorm") if after else None
        self.after_mlp = norm("post_feedforward_layernorm") if after else None

        own = layer < spec.cached_layers  # has keys and values of its own

        def norms(*sizes: tuple[int, ...]) -> tuple[RmsNorm, ...]:
            """Of queries, and of keys where there are any."""
            names = ("self_attn.q_norm", "self_attn.k_norm")[: 2 if own else 1]
            return tuple(norm(name, *size) for name, size in zip(names, sizes, strict=False))

        dim = spec.head_dim
        by_head = (
            ((spec.heads, dim), (spec.kv_heads, dim)) if spec.norm_by_head else ((dim,), (dim,))
        )
        self.attention = Attention(
            layer,
            spec.source_of(layer),
            spec.attention(layer),
            head_norms=norms(*by_head) if spec.head_norm else None,
            row_norms=norms((spec.q_width,), (spec.kv_width,)) if spec.row_norm else None,
            rope=spec.rope_of(layer),
            alibi=_alibi(spec, weights.device),
            sinks=weights.take(f"{prefix}.self_attn.sinks", (spec.heads,)) if spec.sinks else None,
            value_norm=_plain_norm(spec, weights) if spec.value_norm and own else None,
        )

    def __call__(self, do: Operations[X], x: X) -> X:
        """x: the residual stream."""
        qkv = do.project(self.qkv, x, self.input_norm)
        y, x = do.attend(self.attention, qkv, x)
        if self.parallel:
            inner = self._inner(do, x)
            return do.add(self.down, inner, do.add(self.o, y, x, None), None)
        x = do.add(self.o, y, x, self.after_attention)
        if self.mixture is not None:
            return do.mix(self.mixture, x, self.mlp_norm)
        return do.add(self.down, self._inner(do, x), x, self.after_mlp)

    @property
    def sites(self) -> list[Site]:
        pair = [self.qkv, self.o]
        return pair if self.mixture is not None else [*pair, self.gate_up, self.down]

    @property
    def halves(self) -> Halves:
        """For a decoder with several residual streams, whose layers have all of these."""
        norms = (self.input_norm, self.after_attention, self.mlp_norm, self.after_mlp)
        found = cast(tuple[RmsNorm, RmsNorm, RmsNorm, RmsNorm], norms)
        gate_up = cast(GatedSite, self.gate_up)
        return Halves(self.qkv, self.attention, self.o, gate_up, self.down, found)

    def _inner(self, do: Operations[X], x: X) -> torch.Tensor:
        """The inner values of the MLP."""
        if isinstance(self.gate_up, GatedSite):
            return do.gate(self.gate_up, x, self.mlp_norm)
        return do.widen(self.gate_up, x, self.mlp_norm)


class Decoder:
    """A loaded model."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        tied = head_is_table(spec, weights.source)
        shape = spec.vocab, spec.hidden
        names = f"{spec.root}.embed_tokens.weight", None if tied else spec.head
        self.embedding, self.head = embedding_and_head(weights, shape, *names)
        self.blocks = [Block(spec, layer, weights) for layer in range(spec.layers)]
        self.norm = _norm(spec, weights, f"{spec.root}.norm.weight", (spec.hidden,))
        self.embedding_norm = None
        if spec.embedding_norm:
            name = f"{spec.root}.embed_norm.weight"
            self.embedding_norm = _norm(spec, weights, name, (spec.hidden,))
        self.streams = None if spec.streams is None else Streams(spec, spec.streams, weights)
        self._halves = [] if spec.streams is None else [block.halves for block in self.blocks]
        scale = spec.embedding_scale
        if spec.rounded_embedding_scale:
            scale = float(torch.tensor(scale, dtype=weights.dtype))
        self._embedding_scale = scale

    @property
    def linears(self) -> list[Linear]:
        """Of all layers and the head, but for those of mixtures of experts."""
        sites = [site for block in self.blocks for site in block.sites]
        return [*(site.linear for site in sites), self.head]

    def __call__(
        self, do: Operations[X], at_once: Callable[[X], X | None] | None = None
    ) -> torch.Tensor:
        """The logits of the step's sampled rows before `finish_logits`: [rows, vocab]. The one forward
        pass: devices differ in what their operations do, not in which there are. at_once: x after all
        blocks, computed in another way, or None in a step for which there is none."""
        x = do.embed(self.embedding, self._embedding_scale, self.embedding_norm)
        if self.streams is not None:
            return do.logits(self.head, self.streams(do, x, self._halves), self.norm)
        after = None if at_once is None else at_once(x)
        if after is not None:
            return do.logits(self.head, after, self.norm)
        for block in self.blocks:
            x = block(do, x)
        return do.logits(self.head, x, self.norm)


def _norm(spec: ModelSpec, weights: Weights, name: str, shape: tuple[int, ...]) -> RmsNorm:
    weight = weights.take(name, shape)
    if spec.layer_norm:
        bias = weights.take_optional(f"{name.removesuffix('.weight')}.bias", shape)
        return LayerNorm(weight, spec.eps, bias)
    return RmsNorm(weight, spec.eps, spec.unit_offset_norm, weights.by_row)


def _alibi(spec: ModelSpec, device: torch.device) -> Alibi | None:
    return None if spec.alibi is None else alibi(spec.alibi, spec.query_scale, device)


def _plain_norm(spec: ModelSpec, weights: Weights) -> RmsNorm:
    return RmsNorm(torch.ones(spec.head_dim, dtype=weights.dtype), spec.eps)


def _matrices(spec: ModelSpec, layer: int, site: str) -> list[Matrix]:
    root = f"{spec.root}.layers.{layer}"
    parts = sites_of(spec, layer)[site]
    return [Matrix(f"{root}.{MODULES[part]}", *part_shape(spec, part)) for part in parts]


def _inner_site(spec: ModelSpec, layer: int, weights: Weights) -> GatedSite:
    gate, up = _matrices(spec, layer, "gate_up")
    share = spec.sparsity[layer] if spec.sparsity else 0.0
    cutoff = NormalDist().inv_cdf(share) if share else None
    return GatedSite(layer, "gate_up", gated_linear(weights, gate, up), cutoff)
