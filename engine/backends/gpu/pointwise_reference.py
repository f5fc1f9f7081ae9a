"""The references for the pointwise kernels in plain torch, and the record that both use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.layers.norm import LayerNorm, RmsNorm
from engine.backends.layers.quantised_kv import quantise_heads

HeadNorms = tuple[
    RmsNorm, ...
]  # for query and key heads, before the rotation (Qwen3), and for values


@dataclass(frozen=True, slots=True)
class RotaryStep:
    """The positions of a step's tokens in their sequences and in the cache."""

    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int32: block * block size + offset; negative: not written


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of values of a head that are rotated together: two neighbours, or one of each half.
    `turned`: the first pairs, which make the beginning of the head, are rotated alone; None: all."""

    neighbours: bool = False
    turned: int | None = None


def rms_norm_reference(x: Tensor, norm: RmsNorm, residual: Tensor | None = None) -> Tensor:
    """The norm of x + residual; `residual` becomes the sum, in place."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    value = x.float()
    if isinstance(norm, LayerNorm):
        value = value - value.mean(-1, keepdim=True)
    scale = (value.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    value = value * scale * norm.weight.float()
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        value += norm.bias.float()
    return value.to(x.dtype)


def rotary_reference(
    qkv: Tensor,
    kv: Tensor,
    step: RotaryStep,
    table: Tensor | None,
    norms: HeadNorms | None = None,
    scales: Tensor | None = None,
    *,
    pairs: Pairs = Pairs(),
    stored: bool = True,
) -> Tensor:
    """Queries rotated, [tokens, heads, dim]; with `stored`, keys and values behind them are written into
    `kv` [blocks, key heads and then value heads, block size, dim], as codes with `scales`. `table` is
    [positions, dim] float32: cosines of each pair, then sines; None: nothing is rotated."""
    _, cached, page, dim = kv.shape
    cached = cached if stored else 0
    heads = qkv.shape[1] // dim - cached
    parts = qkv.reshape(len(qkv), -1, dim)
    q, k, v = torch.split(parts, [heads, cached // 2, cached // 2], 1)
    wide = q.float(), k.float()
    if norms is not None:
        wide = rms_norm_reference(wide[0], norms[0]), rms_norm_reference(wide[1], norms[:2][-1])
        v = rms_norm_reference(v.float(), norms[2]) if len(norms) > 2 else v
    if table is not None:
        angle = table[step.positions.long()][:, None, :]
        wide = rotate(wide[0], angle, pairs), rotate(wide[1], angle, pairs)
    kept = (step.slots >= 0) & stored
    blocks, places = (step.slots[kept] // page).long(), (step.slots[kept] % page).long()
    written = torch.cat((wide[1], v.float()), 1)[kept]
    if scales is not None:
        codes, of_heads = quantise_heads(written, kv.dtype == torch.float8_e4m3fn)
        kv.view(torch.uint8)[blocks, :, places] = codes
        scales[blocks, :, places] = of_heads
    else:
        kv[blocks, :, places] = written.to(kv.dtype)
    return wide[0].to(qkv.dtype)


def rotate(x: Tensor, angle: Tensor, pairs: Pairs) -> Tensor:
    cos, sin = angle.chunk(2, -1)
    if pairs.neighbours:
        low, high = x[..., ::2], x[..., 1::2]
        turned = low * cos - high * sin, high * cos + low * sin
        return torch.stack(turned, -1).flatten(-2)
    if pairs.turned is not None:
        few = torch.cat((cos[..., : pairs.turned], sin[..., : pairs.turned]), -1)
        first, rest = x.tensor_split((2 * pairs.turned,), -1)
        return torch.cat((rotate(first, few, Pairs()), rest), -1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def gated_reference(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """act(gate) * up of rows that hold the gate followed by the up part."""
    gate, up = gate_up.float().chunk(2, -1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    return (act * up).to(gate_up.dtype)
