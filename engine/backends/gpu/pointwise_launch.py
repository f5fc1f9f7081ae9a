"""Launches the pointwise kernels; each has a reference in `pointwise_reference`."""

import torch
from torch import Tensor

from engine.backends.gpu.kv_launch import of_kernels
from engine.backends.gpu.launch import power_of_two
from engine.backends.gpu.pointwise import (
    activated_kernel,
    gated_kernel,
    rms_norm_kernel,
    rotary_kernel,
)
from engine.backends.gpu.pointwise_reference import HeadNorms, Pairs, RotaryStep
from engine.backends.layers.norm import LayerNorm, RmsNorm

HEADS_PER_PROGRAM = 4


def rms_norm(x: Tensor, norm: RmsNorm, residual: Tensor | None = None) -> Tensor:
    """`x` is [tokens, width]; `residual` becomes the sum, in place. Also of a layer norm."""
    width = x.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rest = x if residual is None else residual
    padded = power_of_two(width)
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    rms_norm_kernel[(x.shape[0],)](
        out, x, rest, norm.weight, norm.weight if bias is None else bias, x.stride(0),
        rest.stride(0), norm.eps, WIDTH=width, PAD=padded, RESIDUAL=residual is not None,
        MEAN=isinstance(norm, LayerNorm), BIAS=bias is not None,
        num_warps=max(1, min(16, padded // 512)),
    )  # fmt: skip
    return out


def rotary(
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
    """`qkv` is [tokens, (heads + 2 kv heads) * dim], without keys and values if not `stored`; `kv`
    [blocks, key heads and then value heads, block size, dim], with `scales` without the last dimension
    if it has codes; `table` [positions, dim] float32: cosines of each pair, then sines; None: nothing
    is rotated."""
    cache = of_kernels(kv, scales)
    data, scale = cache.data, cache.scales
    _, cached, page, dim = kv.shape
    cached = cached if stored else 0
    heads = qkv.shape[1] // dim - cached
    out = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
    groups = -(-(heads + cached) // HEADS_PER_PROGRAM)
    rotary_kernel[(qkv.shape[0], groups)](
        out, data, scale, qkv, step.positions, step.slots, qkv if table is None else table,
        norms[0].weight if norms else qkv, norms[:2][-1].weight if norms else qkv,
        qkv.stride(0), data.stride(0), data.stride(2), data.stride(1), scale.stride(0), scale.stride(1),
        norms[0].eps if norms else 0.0,
        TURNED=dim // 2 if pairs.turned is None else pairs.turned, NEIGHBOURS=pairs.neighbours,
        MEAN=norms is not None and isinstance(norms[0], LayerNorm),
        BY_HEAD=norms is not None and norms[0].weight.dim() > 1,
        OF_VALUES=norms is not None and len(norms) > 2,
        Q_HEADS=heads, KV_HEADS=cached // 2, HALF=dim // 2, HALF_PAD=power_of_two(dim // 2),
        HEADS=HEADS_PER_PROGRAM, PAGE=page, NORM=norms is not None, ROTATE=table is not None,
        KIND=cache.kind, num_warps=2,
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """`gate_up` is [tokens, 2 * width]."""
    gate, up = gate_up.tensor_split(2, 1)
    return gated_by(gate, up, gelu)


def gated_by(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(gate) * up, each [tokens, width] with a stride of its own."""
    tokens, width = gate.shape
    out = torch.empty(tokens, width, dtype=gate.dtype, device=gate.device)
    block = min(1024, power_of_two(width))
    gated_kernel[(tokens, -(-width // block))](
        out, gate, up, gate.stride(0), up.stride(0),
        WIDTH=width, BLOCK=block, GELU=gelu, num_warps=4,
    )  # fmt: skip
    return out


def activated(x: Tensor, activation: str) -> Tensor:
    """activation(x), in place. `x` is [tokens, width]."""
    tokens, width = x.shape
    block = min(1024, power_of_two(width))
    activated_kernel[(tokens, -(-width // block))](
        x, x.stride(0), WIDTH=width, BLOCK=block, ACTIVATION=activation, num_warps=4
    )
    return x
