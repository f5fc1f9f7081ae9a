"""The references for the pointwise kernels in plain torch, and the record that both use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.norm import RmsNorm

HeadNorms = tuple[RmsNorm, ...]  # for query and key heads, before the rotation (Qwen3)


@dataclass(frozen=True, slots=True)
class RotaryStep:
    """The positions of a step's tokens in their sequences and in the cache."""

    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int32: block * block size + offset; negative: not written


def rms_norm_reference(x: Tensor, norm: RmsNorm, residual: Tensor | None = None) -> Tensor:
    """The norm of x + residual; `residual` becomes the sum, in place."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    value = x.float()
    scale = (value.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (value * scale * norm.weight.float()).to(x.dtype)


def rotary_reference(
    qkv: Tensor, kv: Tensor, step: RotaryStep, table: Tensor | None, norms: HeadNorms | None = None
) -> Tensor:
    """Queries rotated, [tokens, heads, dim]; keys and values written into `kv` [blocks, key heads
    and then value heads, block size, dim]. `table` is [positions, dim] float32: cosines, then sines;
    None: nothing is rotated."""
    _, cached, page, dim = kv.shape
    heads = qkv.shape[1] // dim - cached
    parts = qkv.reshape(len(qkv), -1, dim)
    q, k, v = torch.split(parts, [heads, cached // 2, cached // 2], 1)
    wide = q.float(), k.float()
    if norms is not None:
        wide = rms_norm_reference(wide[0], norms[0]), rms_norm_reference(wide[1], norms[1])
    if table is not None:
        angle = table[step.positions.long()][:, None, :]
        wide = _rotate(wide[0], angle), _rotate(wide[1], angle)
    kept = step.slots >= 0
    blocks, places = (step.slots[kept] // page).long(), (step.slots[kept] % page).long()
    k = wide[1].to(kv.dtype)
    kv[blocks, :, places] = torch.cat((k, v.to(kv.dtype)), 1)[kept]
    return wide[0].to(qkv.dtype)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.chunk(2, -1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def gated_reference(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """act(gate) * up of rows that hold the gate followed by the up part."""
    gate, up = gate_up.float().chunk(2, -1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    return (act * up).to(gate_up.dtype)
