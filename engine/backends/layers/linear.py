"""Linear layers: what the operations need of one, and those with float weights.

A weight is packed once for the processor, where torch supports it.

oneDNN's own layout multiplies a single row twice as fast as the plain one, with identical results;
it also fuses the operation after the product (a sum, an activation, a factor).

A processor without bfloat16 products computes in float32. Weights that were trained as half floats
are then kept as float16, which FBGEMM widens inside the product: half the bytes to read.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.backends.compiled.half import fits_half

_MIN_FLOAT_SIZE = 1 << 20  # elements; a smaller float32 matrix gains less than the op's overhead


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight, [out, in], is packed: bfloat16 always, float32 where it is large.

    Measured on a 2-core AVX-512 machine: float32 [2816, 1024] takes 0.55 of the plain product's
    time at 8 rows, 0.67 at 32, 0.87 at 512, and 1.15 at one row.
    """
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _MIN_FLOAT_SIZE
    return weight.dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported())


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16; elsewhere oneDNN emulates it, four times slower
    than float32."""
    if torch.cpu._is_avx512_supported():
        return torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear(Protocol):
    """y = x W^T + b, whatever the weight is stored as (also `quantised_linear.py`)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product plus `other`, which is not changed."""


class GatedLinear(Linear, Protocol):
    """The gate and up projections of one input; as a linear, the gate's outputs, then the others."""

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate, up), each a tensor or a view of half of the columns."""

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up"""


class DenseLinear:
    """Implements `Linear`. Weight: [out, in]. The given weight may be freed after packing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._half = None
        self.packed = False
        if fits_half(weight):
            self._half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
            weight = _emptied(weight)
        elif can_pack(weight):
            self.packed = True
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, "none", "") if self.packed else self._product(x)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return self._product(x).add_(other)
        return self._binary(x, other, "add")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return self._product(x).mul_(other)
        return self._binary(x, other, "mul")

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if not self.packed:
            return activate(self._product(x), activation)
        if activation == "silu":
            return self._unary(x, "swish", "")
        return self._unary(x, "gelu", "none" if activation == "gelu" else "tanh")

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._half is None:
            return F.linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._half)
        return out

    def _unary(self, x: torch.Tensor, kind: str, algorithm: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, kind, [], algorithm
        )
        return out

    def _binary(self, x: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.weight, self.bias, kind
        )
        return out


class DenseGatedLinear(DenseLinear):
    """Implements `GatedLinear`. The projections are one matrix, or two where they are packed, so that
    activation and multiplication are fused into the products."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._halves: tuple[DenseLinear, DenseLinear] | None = None
        gate, up = weight.chunk(2)
        if can_pack(gate) or fits_half(gate):
            biases = (None, None) if bias is None else bias.chunk(2)
            self._halves = DenseLinear(gate, biases[0]), DenseLinear(up, biases[1])
            self.packed, self.weight, self.bias = True, _emptied(weight), None
        else:
            super().__init__(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._halves is None:
            return super().__call__(x)
        return torch.cat([half(x) for half in self._halves], -1)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._halves is None:
            gate, up = super().__call__(x).chunk(2, -1)
            return gate, up
        return self._halves[0](x), self._halves[1](x)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if self._halves is None:
            gate, up = self.halves(x)
            return activate(gate, activation).mul_(up)
        return self._halves[1].times(x, self._halves[0].activated(x, activation))


def _emptied(weight: torch.Tensor) -> torch.Tensor:
    """No rows, for the shape and type; a slice of the weight would keep all of its memory."""
    return weight.new_empty((0, *weight.shape[1:]))


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x); changes x in place for silu."""
    if activation == "silu":
        return F.silu(x, inplace=True)
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")
