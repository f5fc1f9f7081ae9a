"""Which linear layers the kernel computes among other things in one call."""

import torch

from engine.dense.linear import Gated, RowGatedLinear, RowLinear
from engine.layers.linear import GatedLinear, Linear
from engine.quantization.linear import QuantizedGatedLinear, QuantizedLinear

_KINDS = (RowLinear, RowGatedLinear, QuantizedLinear, QuantizedGatedLinear)


def compiled_matrix(linear: Linear | GatedLinear) -> Gated | None:
    """The only matrix of a linear that the kernel computes, with its gate."""
    if not isinstance(linear, _KINDS) or linear.table is None or len(linear.matrices) > 1:
        return None
    return linear.matrices[0]


def compiled_table(linear: Linear | GatedLinear) -> torch.Tensor | None:
    """What `layers.h` reads of the matrices, to be kept as long as it is read; None for
    a linear that is computed otherwise."""
    return linear.table if isinstance(linear, _KINDS) else None
