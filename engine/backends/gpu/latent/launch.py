"""Launches what latent attention adds to its products; each has a reference in `reference.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_launch import rank_tile
from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep
from engine.backends.gpu.kv_launch import of_kernels
from engine.backends.gpu.latent.kernels import by_head_kernel, place_latent_kernel
from engine.backends.gpu.launch import power_of_two, precision
from engine.backends.gpu.pointwise_reference import RotaryStep
from engine.backends.layers.norm import RmsNorm

_HEADS = 16  # of which the rotated parts are read at once


def place_latent(
    out: Tensor, q: Tensor, keys: Tensor, step: RotaryStep, table: Tensor, norm: RmsNorm,
    *, kv: Tensor, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` [tokens, heads, latent + rotated] gets the rotated parts of the queries `q` [tokens, heads,
    plain + rotated]. `keys` [tokens, latent + rotated] go into `kv` [blocks, 1, block size, latent +
    rotated], normed and rotated. `table` [positions, rotated] float32: each pair's cosine, then sines."""
    cache = of_kernels(kv, scales)
    tokens, heads, width = out.shape
    rotated, page = table.shape[1], kv.shape[2]
    place_latent_kernel[(tokens,)](
        out, cache.data, cache.scales, q, keys, norm.weight, step.positions, step.slots, table,
        q.stride(0), keys.stride(0), out.stride(0), cache.data.stride(0), cache.data.stride(2),
        cache.scales.stride(0), norm.eps,
        HEADS=heads, PLAIN=q.shape[2] - rotated, LATENT=width - rotated,
        LATENT_PAD=power_of_two(width - rotated), HALF=rotated // 2,
        HALF_PAD=power_of_two(rotated // 2), BLOCK_H=min(_HEADS, power_of_two(heads)), PAGE=page,
        KIND=cache.kind, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """One side of an adapter's matrices: 0 is A, 1 is B; where its rows are used from, and how much
    further on for each head, in elements."""

    side: int
    first: int = 0
    by_head: int = 0


def by_head(
    y: Tensor, x: Tensor, arena: Tensor, site: LoraSite, step: LoraStep, *, inner: Rows, outer: Rows
) -> None:
    """y[token, head] += (x[token, head] F^T) G in place. `y` [tokens, heads, outputs] and `x` [tokens,
    heads, inputs] have neighbouring last values; F and G are `inner` and `outer` of `site`."""
    heads, inputs = x.shape[1:]
    few = step.chunk_rows == 16
    by_head_kernel[(step.chunks.shape[0], heads)](
        y, x, arena, step.order, step.chunks, site.rows[:, 0, inner.side],
        site.rows[:, 0, outer.side], site.ranks, y.stride(0), y.stride(1), x.stride(0), x.stride(1),
        site.rows.stride(0), site.ranks.stride(0),
        inner.first, inner.by_head, outer.first, outer.by_head,
        INPUTS=inputs, OUTPUTS=y.shape[2], BLOCK_M=step.chunk_rows,
        BLOCK_R=rank_tile(step.max_rank), BLOCK_K=64, BLOCK_N=128 if few else 64,
        PRECISION=precision(x), num_warps=4, num_stages=2 if x.dtype == torch.float32 else 3,
    )  # fmt: skip
