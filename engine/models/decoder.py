"""The decoder of all model families: embedding, blocks of attention and gated MLP, head."""

import torch

from engine.layers.linear import GatedLinear, Linear
from engine.layers.matrices import MODULES, SITES, part_shape
from engine.layers.norm import RmsNorm
from engine.layers.operations import Attention, Operations, Site, X
from engine.model_spec import ModelSpec
from engine.models.weights import Weights


class Block:
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Weights) -> None:
        prefix = f"model.layers.{layer}"

        def site(name: str, kind: type[Linear] = Linear) -> Site:
            return Site(layer, name, kind(*_stacked(weights, spec, prefix, name)))

        self.qkv, self.o = site("qkv"), site("o")
        self.gate_up, self.down = site("gate_up", GatedLinear), site("down")

        def norm(name: str, size: int = spec.hidden) -> RmsNorm:
            weight = weights.take(f"{prefix}.{name}.weight", (size,))
            return RmsNorm(weight, spec.eps, spec.unit_offset_norm)

        self.input_norm = norm("input_layernorm")
        self.mlp_norm = norm(
            "pre_feedforward_layernorm" if spec.sandwich_norm else "post_attention_layernorm"
        )
        self.after_attention = norm("post_attention_layernorm") if spec.sandwich_norm else None
        self.after_mlp = norm("post_feedforward_layernorm") if spec.sandwich_norm else None
        head_norms: tuple[RmsNorm, RmsNorm] | None = None
        if spec.head_norm:
            q_norm, k_norm = (norm(f"self_attn.{part}_norm", spec.head_dim) for part in "qk")
            head_norms = q_norm, k_norm
        self.attention = Attention(layer, spec.attention(layer), head_norms)

    def __call__(self, do: Operations[X], x: X) -> X:
        """x: the residual stream."""
        qkv = do.project(self.qkv, x, self.input_norm)
        y, x = do.attend(self.attention, qkv, x)
        x = do.add(self.o, y, x, self.after_attention)
        y = do.gate(self.gate_up, x, self.mlp_norm)
        return do.add(self.down, y, x, self.after_mlp)


class Decoder:
    """A loaded model."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        name, shape = "model.embed_tokens.weight", (spec.vocab, spec.hidden)
        self.embedding = weights.take(name, shape)
        self.blocks = [Block(spec, layer, weights) for layer in range(spec.layers)]
        final = weights.take("model.norm.weight", (spec.hidden,))
        self.norm = RmsNorm(final, spec.eps, spec.unit_offset_norm)
        tied = spec.tied or "lm_head.weight" not in weights
        self.head = Linear(self.embedding if tied else weights.take("lm_head.weight", shape))

    def __call__(self, do: Operations[X]) -> torch.Tensor:
        """The logits of the step's sampled rows before the soft cap: [rows, vocab]. The one forward
        pass: devices differ in what their operations do, not in which there are."""
        x = do.embed(self.embedding, self.spec.embedding_scale)
        for block in self.blocks:
            x = block(do, x)
        return do.logits(self.head, x, self.norm)


def _stacked(
    weights: Weights, spec: ModelSpec, prefix: str, site: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's matrices of one input as one, with their biases where they have them."""
    parts = [(f"{prefix}.{MODULES[part]}", *part_shape(spec, part)) for part in SITES[site]]
    weight = torch.cat([weights.take(f"{name}.weight", (out, width)) for name, width, out in parts])
    biases = [weights.take_optional(f"{name}.bias", (out,)) for name, _, out in parts]
    if all(bias is None for bias in biases):
        return weight, None
    filled = [
        weight.new_zeros(out) if bias is None else bias
        for bias, (_, _, out) in zip(biases, parts, strict=True)
    ]
    return weight, torch.cat(filled)
