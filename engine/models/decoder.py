"""The decoder that all families share: embedding, blocks of attention and gated MLP, head."""

import torch
import torch.nn.functional as F

from engine.layers.attention import attend
from engine.layers.kv import KvPool
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rotary import rotate_
from engine.layers.step import StepInputs
from engine.models.spec import ModelSpec
from engine.models.weights import Weights


class Block:
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Weights) -> None:
        self.spec = spec
        self.layer = layer
        self.window = spec.windows[layer]
        prefix = f"model.layers.{layer}"
        hidden, inner = spec.hidden, spec.intermediate
        self.qkv = _linear(
            weights,
            [
                (f"{prefix}.self_attn.q_proj", spec.q_width),
                (f"{prefix}.self_attn.k_proj", spec.kv_width),
                (f"{prefix}.self_attn.v_proj", spec.kv_width),
            ],
            hidden,
        )
        self.o = _linear(weights, [(f"{prefix}.self_attn.o_proj", hidden)], spec.q_width)
        self.gate_up = _linear(
            weights, [(f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner)], hidden
        )
        self.down = _linear(weights, [(f"{prefix}.mlp.down_proj", hidden)], inner)

        def norm(name: str, size: int = hidden) -> RmsNorm:
            weight = weights.take(f"{prefix}.{name}.weight", (size,))
            return RmsNorm(weight, spec.eps, spec.unit_offset_norm)

        self.input_norm = norm("input_layernorm")
        self.mlp_norm = norm(
            "pre_feedforward_layernorm" if spec.sandwich_norm else "post_attention_layernorm"
        )
        self.after_attention = norm("post_attention_layernorm") if spec.sandwich_norm else None
        self.after_mlp = norm("post_feedforward_layernorm") if spec.sandwich_norm else None
        self.q_norm = norm("self_attn.q_norm", spec.head_dim) if spec.head_norm else None
        self.k_norm = norm("self_attn.k_norm", spec.head_dim) if spec.head_norm else None

    def __call__(self, x: torch.Tensor, step: StepInputs, pool: KvPool) -> torch.Tensor:
        y = self._attention(self.input_norm(x), step, pool)
        x = x + (y if self.after_attention is None else self.after_attention(y))
        y = self._mlp(self.mlp_norm(x), step)
        return x + (y if self.after_mlp is None else self.after_mlp(y))

    def _apply(self, linear: Linear, site: str, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        y = linear(x)
        if step.lora is not None:
            step.lora.add_(self.layer, site, x, y)
        return y

    def _attention(self, x: torch.Tensor, step: StepInputs, pool: KvPool) -> torch.Tensor:
        spec = self.spec
        qkv = self._apply(self.qkv, "qkv", x, step).view(x.shape[0], -1, spec.head_dim)
        rotated = qkv[:, : spec.heads + spec.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            rotated[:, : spec.heads] = self.q_norm(rotated[:, : spec.heads])
            rotated[:, spec.heads :] = self.k_norm(rotated[:, spec.heads :])
        rotate_(rotated, step.cos, step.sin)
        pool.write(self.layer, step.blocks, step.offsets, qkv[:, spec.heads :])
        out = attend(
            qkv[:, : spec.heads],
            pool,
            self.layer,
            step.tiles[self.window],
            step.geometry,
            spec.query_scale,
            spec.attention_cap,
        )
        return self._apply(self.o, "o", out, step)

    def _mlp(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        gate, up = self._apply(self.gate_up, "gate_up", x, step).chunk(2, -1)
        if self.spec.activation == "silu":
            gate = F.silu(gate)
        else:
            gate = F.gelu(gate, approximate="tanh")
        return self._apply(self.down, "down", gate.mul_(up), step)


class Decoder:
    """A whole model, loaded."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        name, shape = "model.embed_tokens.weight", (spec.vocab, spec.hidden)
        self.embedding = weights.take(name, shape)
        self.blocks = [Block(spec, layer, weights) for layer in range(spec.layers)]
        final = weights.take("model.norm.weight", (spec.hidden,))
        self.norm = RmsNorm(final, spec.eps, spec.unit_offset_norm)
        tied = spec.tied or "lm_head.weight" not in weights
        self.head = Linear(self.embedding if tied else weights.take("lm_head.weight", shape))

    def __call__(self, step: StepInputs, pool: KvPool) -> torch.Tensor:
        """Logits in float32 of the step's sampled rows: [rows, vocab]."""
        x = F.embedding(step.tokens, self.embedding)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, step, pool)
        if not step.sampled.numel():
            return x.new_empty((0, self.spec.vocab), dtype=torch.float32)
        logits = self.head(self.norm(x.index_select(0, step.sampled))).float()
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _linear(weights: Weights, parts: list[tuple[str, int]], width: int) -> Linear:
    """The named matrices stacked into one product, with their biases where they have them."""
    weight = torch.cat([weights.take(f"{name}.weight", (out, width)) for name, out in parts])
    biases = [weights.take_optional(f"{name}.bias", (out,)) for name, out in parts]
    given = [bias for bias in biases if bias is not None]
    if not given:
        return Linear(weight)
    filled = [
        weight.new_zeros(out) if bias is None else bias
        for bias, (_, out) in zip(biases, parts, strict=True)
    ]
    return Linear(weight, torch.cat(filled))
