"""The decoder of all model families: embedding, blocks of attention and gated MLP, head."""

import torch
import torch.nn.functional as F

from engine.layers.attention import attend
from engine.layers.kv import KvPool
from engine.layers.linear import GatedLinear, Linear, activate
from engine.layers.lora import LoraStep
from engine.layers.matrices import MODULES, SITES, part_shape
from engine.layers.norm import RmsNorm
from engine.layers.rotary import rotate_
from engine.layers.step import Queries, StepInputs
from engine.model_spec import ModelSpec
from engine.models.weights import Weights


class Block:
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Weights) -> None:
        self.spec = spec
        self.layer = layer
        self.shape = spec.attention(layer)
        prefix = f"model.layers.{layer}"
        self.qkv = Linear(*_stacked(weights, spec, prefix, "qkv"))
        self.o = Linear(*_stacked(weights, spec, prefix, "o"))
        self.gate_up = GatedLinear(*_stacked(weights, spec, prefix, "gate_up"))
        self.down = Linear(*_stacked(weights, spec, prefix, "down"))

        def norm(name: str, size: int = spec.hidden) -> RmsNorm:
            weight = weights.take(f"{prefix}.{name}.weight", (size,))
            return RmsNorm(weight, spec.eps, spec.unit_offset_norm)

        self.input_norm = norm("input_layernorm")
        self.mlp_norm = norm(
            "pre_feedforward_layernorm" if spec.sandwich_norm else "post_attention_layernorm"
        )
        self.after_attention = norm("post_attention_layernorm") if spec.sandwich_norm else None
        self.after_mlp = norm("post_feedforward_layernorm") if spec.sandwich_norm else None
        self.head_norms: tuple[RmsNorm, RmsNorm] | None = None  # of queries and of keys
        if spec.head_norm:
            q_norm, k_norm = (norm(f"self_attn.{part}_norm", spec.head_dim) for part in "qk")
            self.head_norms = q_norm, k_norm

    def __call__(
        self, x: torch.Tensor, step: StepInputs, queries: Queries | None, pool: KvPool
    ) -> torch.Tensor:
        """x: the residual stream of all rows. Returns that of the rows in `queries`."""
        qkv = self._qkv(self.input_norm(x), step, pool)
        if queries is None:
            return x[:0]
        spec = self.spec
        q = qkv.view(x.shape[0], -1, spec.head_dim)[:, : spec.heads]
        if queries.rows is not None:
            q, x = q.index_select(0, queries.rows), x.index_select(0, queries.rows)
        y = attend(q, pool, self.layer, queries.tiles[self.shape.window], self.shape)
        x = self._join(self.o, "o", y, x, self.after_attention, queries.lora)
        y = self._gated(self.mlp_norm(x), queries.lora)
        return self._join(self.down, "down", y, x, self.after_mlp, queries.lora)

    def _qkv(self, x: torch.Tensor, step: StepInputs, pool: KvPool) -> torch.Tensor:
        """Queries, keys and values, concatenated; keys and values are also written to the pool."""
        spec = self.spec
        qkv = self.qkv(x)
        lora = step.all_rows.lora
        if lora is not None:
            ends = (spec.q_width, spec.q_width + spec.kv_width)
            lora.add_(self.layer, "qkv", x, *qkv.tensor_split(ends, -1))
        heads = qkv.view(x.shape[0], -1, spec.head_dim)
        q, kv = heads[:, : spec.heads], heads[:, spec.heads :]
        if self.head_norms is not None:
            k = kv[:, : spec.kv_heads]
            q.copy_(self.head_norms[0](q))
            k.copy_(self.head_norms[1](k))
        rotate_(qkv[:, : spec.q_width + spec.kv_width], step.cos, step.sin, spec.head_dim)
        pool.write(self.layer, step.kv_slots, kv)
        return qkv

    def _join(
        self,
        linear: Linear,
        site: str,
        y: torch.Tensor,
        residual: torch.Tensor,
        norm: RmsNorm | None,
        lora: LoraStep | None,
    ) -> torch.Tensor:
        """The residual stream plus a half-block's projection, which is normed if `norm` is set."""
        out = linear(y) if norm is not None else linear.plus(y, residual)
        if lora is not None:
            lora.add_(self.layer, site, y, out)
        return out if norm is None else residual + norm(out)

    def _gated(self, x: torch.Tensor, lora: LoraStep | None) -> torch.Tensor:
        activation = self.spec.activation
        if lora is None:
            return self.gate_up.gated(x, activation)
        gate, up = self.gate_up.halves(x)
        lora.add_(self.layer, "gate_up", x, gate, up)
        return activate(gate, activation).mul_(up)


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

    def __call__(self, step: StepInputs, pool: KvPool) -> torch.Tensor:
        """Logits in float32 of the step's sampled rows: [rows, vocab]."""
        x = F.embedding(step.tokens, self.embedding)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        for block in self.blocks[:-1]:
            x = block(x, step, step.all_rows, pool)
        x = self.blocks[-1](x, step, step.sampled, pool)
        if not x.shape[0]:
            return x.new_empty((0, self.spec.vocab), dtype=torch.float32)
        logits = self.head(self.norm(x)).float()
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


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
