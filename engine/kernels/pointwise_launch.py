"""Launching the pointwise kernels; each is the twin of its namesake in `pointwise_reference`."""

import torch
from torch import Tensor

from engine.kernels.pointwise import gated_kernel, rms_norm_kernel, rotary_kernel
from engine.kernels.pointwise_reference import HeadNorm, RotaryStep

HEADS_PER_PROGRAM = 4


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """`x` is [tokens, width]; `residual` becomes the sum, in place."""
    width = x.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rest = x if residual is None else residual
    padded = _power_of_two(width)
    rms_norm_kernel[(x.shape[0],)](
        out, x, rest, weight, x.stride(0), rest.stride(0), eps, WIDTH=width, PAD=padded,
        RESIDUAL=residual is not None, OFFSET=offset, num_warps=max(1, min(16, padded // 512)),
    )  # fmt: skip
    return out


def rotary(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: RotaryStep,
    table: Tensor,
    norm: HeadNorm | None = None,
) -> Tensor:
    """`qkv` is [tokens, (heads + 2 kv heads) * dim]; the caches [blocks, kv heads, block size,
    dim] with equal strides; `table` [positions, dim] float32: cosines, then sines."""
    kv_heads, page, dim = k_cache.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
    groups = -(-(heads + 2 * kv_heads) // HEADS_PER_PROGRAM)
    rotary_kernel[(qkv.shape[0], groups)](
        out, k_cache, v_cache, qkv, step.positions, step.slots, table,
        norm.q_weight if norm else qkv, norm.k_weight if norm else qkv,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(2), k_cache.stride(1),
        norm.eps if norm else 0.0,
        Q_HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_PAD=_power_of_two(dim // 2),
        HEADS=HEADS_PER_PROGRAM, PAGE=page, NORM=norm is not None,
        NORM_OFFSET=norm.offset if norm else 0.0, num_warps=2,
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """`gate_up` is [tokens, 2 * width]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, _power_of_two(width))
    gated_kernel[(tokens, -(-width // block))](
        out, gate_up, gate_up.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, num_warps=4
    )
    return out


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
