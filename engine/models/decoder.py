"""The decoder of all model families: embedding, blocks of attention and gated MLP, head."""

import torch

from engine.layers.matrices import MODULES, SITES, part_shape
from engine.layers.norm import RmsNorm
from engine.layers.operations import Attention, GatedSite, Operations, Site, X
from engine.model_spec import ModelSpec
from engine.models.experts import mixture
from engine.models.linears import Matrix, embedding_and_head, gated_linear, linear
from engine.models.weights import Weights


class Block:
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}"

        def site(name: str) -> Site:
            return Site(layer, name, linear(weights, _matrices(spec, prefix, name)))

        self.qkv, self.o = site("qkv"), site("o")
        experts = spec.experts_of(layer)
        self.mixture = None if experts is None else mixture(spec, experts, prefix, weights)
        if experts is None:
            gate, up = _matrices(spec, prefix, "gate_up")
            self.gate_up = GatedSite(layer, "gate_up", gated_linear(weights, gate, up))
            self.down = site("down")

        def norm(name: str, size: int = spec.hidden) -> RmsNorm:
            weight = weights.take(f"{prefix}.{name}.weight", (size,))
            return RmsNorm(weight, spec.eps, spec.unit_offset_norm)

        before, after = spec.norms_before, spec.norms_after
        mlp_norm = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        self.input_norm = norm("input_layernorm") if before else None
        self.mlp_norm = norm(mlp_norm) if before else None
        self.after_attention = norm("post_attention_layernorm") if after else None
        self.after_mlp = norm("post_feedforward_layernorm") if after else None

        def pair(q_size: int, k_size: int) -> tuple[RmsNorm, RmsNorm]:
            return norm("self_attn.q_norm", q_size), norm("self_attn.k_norm", k_size)

        self.attention = Attention(
            layer,
            spec.attention(layer),
            head_norms=pair(spec.head_dim, spec.head_dim) if spec.head_norm else None,
            row_norms=pair(spec.q_width, spec.kv_width) if spec.row_norm else None,
            rotated=layer not in spec.unrotated,
        )

    def __call__(self, do: Operations[X], x: X) -> X:
        """x: the residual stream."""
        qkv = do.project(self.qkv, x, self.input_norm)
        y, x = do.attend(self.attention, qkv, x)
        x = do.add(self.o, y, x, self.after_attention)
        if self.mixture is not None:
            return do.mix(self.mixture, x, self.mlp_norm)
        y = do.gate(self.gate_up, x, self.mlp_norm)
        return do.add(self.down, y, x, self.after_mlp)


class Decoder:
    """A loaded model."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        tied = spec.tied or "lm_head.weight" not in weights
        shape = spec.vocab, spec.hidden
        self.embedding, self.head = embedding_and_head(weights, shape, tied)
        self.blocks = [Block(spec, layer, weights) for layer in range(spec.layers)]
        final = weights.take("model.norm.weight", (spec.hidden,))
        self.norm = RmsNorm(final, spec.eps, spec.unit_offset_norm)
        scale = spec.embedding_scale
        if spec.rounded_embedding_scale:
            scale = float(torch.tensor(scale, dtype=weights.dtype))
        self._embedding_scale = scale

    def __call__(self, do: Operations[X]) -> torch.Tensor:
        """The logits of the step's sampled rows before `finish_logits`: [rows, vocab]. The one forward
        pass: devices differ in what their operations do, not in which there are."""
        x = do.embed(self.embedding, self._embedding_scale)
        for block in self.blocks:
            x = block(do, x)
        return do.logits(self.head, x, self.norm)


def _matrices(spec: ModelSpec, prefix: str, site: str) -> list[Matrix]:
    return [Matrix(f"{prefix}.{MODULES[part]}", *part_shape(spec, part)) for part in SITES[site]]
