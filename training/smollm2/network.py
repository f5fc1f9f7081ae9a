"""The model in plain torch, with LoRA matrices that learn. Weights are frozen, in bfloat16."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.models.gguf.header import read_header
from engine.models.gguf.weights import GgufSource

# The upper layers alone learn, which halves the work; three projections at rank 8 then keep an
# adapter below a megabyte in float16.
FIRST_LAYER = 12
TARGETS, RANK, ALPHA = ("q_proj", "v_proj", "o_proj"), 8, 32


class Network:
    """Llama's decoder; `lora` holds (A, B) by module name, both in float32."""

    def __init__(self, path: Path, config: dict[str, Any], seed: int) -> None:
        source = GgufSource(read_header(path))
        self.config = config
        names = [name for name in source.names() if "norm" not in name]
        self.weights = {name: source.read(name, torch.bfloat16) for name in names}
        norms = [name for name in source.names() if "norm" in name]
        self.norms = {name: source.read(name, torch.float32) for name in norms}
        source.close()
        self.lora = self._new_lora(torch.Generator().manual_seed(seed))
        self.embedding = self.weights["model.embed_tokens.weight"]

    def _new_lora(self, random: torch.Generator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A random, B zero: at first the answer is the base model's."""
        made = {}
        for layer in range(FIRST_LAYER, self.config["num_hidden_layers"]):
            for target in TARGETS:
                name = f"model.layers.{layer}.self_attn.{target}"
                out, width = self.weights[f"{name}.weight"].shape
                a = torch.randn(RANK, width, generator=random) * width**-0.5
                made[name] = a.requires_grad_(), torch.zeros(out, RANK, requires_grad=True)
        return made

    def parameters(self) -> list[torch.Tensor]:
        return [half for pair in self.lora.values() for half in pair]

    def logits(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """ids: [sequences, length], padded at the end; wanted: bool of the same shape.
        Returns [wanted, vocabulary] in float32."""
        x = F.embedding(ids, self.embedding)
        angles = self._angles(ids.shape[1])
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), prefix, angles)
            x = x + self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm"), prefix)
        return F.linear(self._norm(x, "model.norm")[wanted], self.embedding).float()

    def _attention(
        self, x: torch.Tensor, prefix: str, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        size = self.config["head_dim"]
        q, k, v = (
            self._linear(x, f"{prefix}.self_attn.{part}_proj")
            .view(*x.shape[:2], -1, size)
            .transpose(1, 2)
            for part in "qkv"
        )
        mixed = F.scaled_dot_product_attention(
            _rotated(q, *angles), _rotated(k, *angles), v, is_causal=True, enable_gqa=True
        )
        return self._linear(mixed.transpose(1, 2).flatten(2), f"{prefix}.self_attn.o_proj")

    def _mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate = F.silu(self._linear(x, f"{prefix}.mlp.gate_proj"))
        return self._linear(
            gate * self._linear(x, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"
        )

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"])
        if name not in self.lora:
            return y
        a, b = self.lora[name]
        return y + F.linear(F.linear(x, a.bfloat16()), b.bfloat16()) * (ALPHA / RANK)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.norms[f"{name}.weight"]
        return F.rms_norm(x.float(), weight.shape, weight, self.config["rms_norm_eps"]).to(x.dtype)

    def _angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.config["head_dim"]
        inverse = self.config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), inverse)
        both = torch.cat((angles, angles), -1)
        return both.cos().bfloat16(), both.sin().bfloat16()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
