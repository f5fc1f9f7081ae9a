"""Launches the kernels of several residual streams. Their references in torch are the methods of
`engine.backends.layers.streams`, which a CPU computes with."""

import torch
from torch import Tensor

from engine.backends.gpu.altup.kernel import (
    correct_kernel,
    join_kernel,
    lengthen_kernel,
    predict_kernel,
    sparse_gated_kernel,
)
from engine.backends.gpu.launch import power_of_two
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.streams import LEAST_SQUARE, StreamLayer

Added = tuple[Tensor, RmsNorm]  # [rows, hidden]: its norm comes to all streams but the first


def predict(
    layer: StreamLayer, x: Tensor, norm: RmsNorm, added: Added | None = None
) -> tuple[Tensor, Tensor]:
    """x [rows, streams, hidden]. The predicted streams, and the norm of the active one."""
    rows, streams, width = x.shape
    out, normed = torch.empty_like(x), x.new_empty(rows, width)
    plus, plus_norm = (x, norm) if added is None else added
    pad = power_of_two(width)
    predict_kernel[(rows,)](
        out, normed, x, plus, plus_norm.weight, layer.router_norm.weight, layer.router,
        layer.prediction, norm.weight, norm.eps,
        WIDTH=width, PAD=pad, STREAMS=streams, STREAMS_PAD=power_of_two(streams),
        ACTIVE=layer.active, ADDED=added is not None, num_warps=_warps(pad),
    )  # fmt: skip
    return out, normed


def join(
    product: Tensor, active: Tensor, x: Tensor, beside: Tensor, norms: tuple[RmsNorm, ...]
) -> tuple[Tensor, Tensor]:
    """All [rows, hidden]; `active` may have another stride. `norms`: of attention's product, of the one
    beside it, and of the MLP. What comes of both products, and its norm."""
    after, beside_norm, norm = norms
    rows, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    pad = power_of_two(width)
    join_kernel[(rows,)](
        out, normed, product, after.weight, active, x, beside, beside_norm.weight, norm.weight,
        active.stride(0), norm.eps, WIDTH=width, PAD=pad, num_warps=_warps(pad),
    )  # fmt: skip
    return out, normed


def correct(
    layer: StreamLayer, product: Tensor, after: RmsNorm, joined: Tensor, predicted: Tensor
) -> tuple[Tensor, Tensor]:
    """The corrected streams [rows, streams, hidden], and the active one, scaled, which gates the layer's
    own input."""
    rows, streams, width = predicted.shape
    out, active = torch.empty_like(predicted), torch.empty_like(joined)
    pad = power_of_two(width)
    correct_kernel[(rows,)](
        out, active, product, after.weight, joined, predicted, layer.router_norm.weight,
        layer.router, layer.correction, joined if layer.scale is None else layer.scale, after.eps,
        WIDTH=width, PAD=pad, STREAMS=streams, STREAMS_PAD=power_of_two(streams),
        ACTIVE=layer.active, SCALED=layer.scale is not None, num_warps=_warps(pad),
    )  # fmt: skip
    return out, active


def spread(x: Tensor, others: Tensor) -> Tensor:
    """x [rows, hidden] and `others` [streams - 1, rows, hidden] at its length, as streams."""
    out = x.new_empty(x.shape[0], 1 + others.shape[0], x.shape[1])
    return _lengthened(out, x, others)


def gather(x: Tensor, others: Tensor) -> Tensor:
    """The mean of x [rows, hidden], which may have a stride of its own, and of `others` [streams - 1,
    rows, hidden] at its length."""
    return _lengthened(x.new_empty(x.shape), x, others)


def _lengthened(out: Tensor, x: Tensor, others: Tensor) -> Tensor:
    rows, width = x.shape
    pad = power_of_two(width)
    lengthen_kernel[(rows,)](
        out, x, others, x.stride(0), rows, WIDTH=width, PAD=pad, STREAMS=1 + others.shape[0],
        LEAST=LEAST_SQUARE, MEAN=out.dim() == 2, num_warps=_warps(pad),
    )  # fmt: skip
    return out


def sparse_gated(gate_up: Tensor, cutoff: float, gelu: bool = False) -> Tensor:
    """`gate_up` is [tokens, 2 * width]. Gates that are not `cutoff` standard deviations above the mean of
    their row are 0; what is above goes through the activation (Spark Transformer)."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    sparse_gated_kernel[(tokens,)](
        out, gate_up, gate_up.stride(0), cutoff, WIDTH=width,
        BLOCK=min(4096, power_of_two(width)), GELU=gelu, num_warps=8,
    )  # fmt: skip
    return out


def _warps(pad: int) -> int:
    return max(1, min(8, pad // 256))
