"""Latent attention in a step on a GPU: products by torch or the kernels of codes, the rest by kernels of
its own. Adapters of each projection are added, as elsewhere, for all adapters in one launch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep
from engine.backends.gpu.latent.launch import Rows, by_head, place_latent
from engine.backends.gpu.pointwise_launch import rms_norm
from engine.backends.gpu.pointwise_reference import RotaryStep
from engine.backends.layers.latent import LatentOutput, LatentQkv
from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm

Product = Callable[[str, Linear, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LatentStep:
    """What the projections of one layer need of a step. `product`: of a matrix by its name among
    `matrices.latent_shapes`, with the step's adapters; `absorbed`: those of `kv_b`, if there are any."""

    product: Product
    absorbed: tuple[Tensor, LoraSite, LoraStep] | None  # the arena, and where rows lie in it

    def queries(
        self, qkv: LatentQkv, x: Tensor, rotary: RotaryStep, table: Tensor,
        cache: tuple[Tensor, Tensor | None],
    ) -> Tensor:  # fmt: skip
        """The queries [tokens, heads, latent + rotated] of normed inputs; their keys are stored."""
        spec, heads, tokens = qkv.spec, len(qkv.absorbed), len(x)
        names = ("q_a", "", "q_b") if len(qkv.queries) > 1 else ("q",)
        q = x
        for name, each in zip(names, qkv.queries, strict=True):
            q = rms_norm(q, each) if isinstance(each, RmsNorm) else self.product(name, each, q)
        q = q.view(tokens, heads, -1)
        keys = self.product("kv_a", qkv.keys, x)
        out = x.new_empty(tokens, heads, spec.latent + spec.rotated)
        plain = q[..., : spec.plain]
        latent = out[..., : spec.latent]
        torch.bmm(plain.transpose(0, 1), qkv.absorbed, out=latent.transpose(0, 1))
        if self.absorbed is not None:
            of_head = Rows(1, by_head=spec.plain + spec.value)
            by_head(latent, plain, *self.absorbed, inner=of_head, outer=Rows(0))
        place_latent(out, q, keys, rotary, table, qkv.norm, kv=cache[0], scales=cache[1])
        return out

    def output(self, linear: LatentOutput, sums: Tensor) -> Tensor:
        """Of the heads' sums of latent vectors [tokens, heads, latent]."""
        spec, heads, tokens = linear.spec, len(linear.absorbed), len(sums)
        values = sums.new_empty(tokens, heads, spec.value)
        torch.bmm(sums.transpose(0, 1), linear.absorbed, out=values.transpose(0, 1))
        if self.absorbed is not None:
            of_head = Rows(1, spec.plain, spec.plain + spec.value)
            by_head(values, sums, *self.absorbed, inner=Rows(0), outer=of_head)
        return self.product("o", linear.output, values.view(tokens, -1))
