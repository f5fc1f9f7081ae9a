"""The pointwise kernels in plain torch, and the record of a rotary step that both take."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotaryStep:
    """Where a step's tokens stand in their sequences and in the cache."""

    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int32: block * block size + place in the block; negative: nowhere


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMS norm of every query and key head before the rotation (Qwen3)."""

    q_weight: Tensor  # [dim]
    k_weight: Tensor  # [dim]
    eps: float
    offset: float = 0.0


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """norm(x + residual) * (weight + offset); `residual` becomes the sum, in place."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    value = x.float()
    scale = (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (value * scale * (weight.float() + offset)).to(x.dtype)


def rotary_reference(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: RotaryStep,
    table: Tensor,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Queries rotated, [tokens, heads, dim]; keys and values written into the caches
    [blocks, kv heads, block size, dim]. `table` is [positions, dim] float32: cosines, then sines.
    """
    kv_heads, page, dim = k_cache.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    parts = qkv.reshape(len(qkv), -1, dim)
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    angle = table[step.positions.long()][:, None, :]
    q = _rotate(_norm(q, norm.q_weight, norm) if norm else q.float(), angle).to(qkv.dtype)
    k = _rotate(_norm(k, norm.k_weight, norm) if norm else k.float(), angle)
    kept = step.slots >= 0
    blocks, places = (step.slots[kept] // page).long(), (step.slots[kept] % page).long()
    k_cache[blocks, :, places] = k[kept].to(k_cache.dtype)
    v_cache[blocks, :, places] = v[kept].to(v_cache.dtype)
    return q


def _norm(x: Tensor, weight: Tensor, norm: HeadNorm) -> Tensor:
    return rms_norm_reference(x.float(), weight, norm.eps, offset=norm.offset)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.chunk(2, -1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def gated_reference(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """act(gate) * up of rows that hold the gate and then the up part."""
    gate, up = gate_up.float().chunk(2, -1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    return (act * up).to(gate_up.dtype)
