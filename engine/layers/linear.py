"""A linear layer whose weight is packed once for the processor, where torch has the op for it.

oneDNN's own layout reads a single row twice as fast as the plain one and gives the same bits; it
also applies what follows a product (a sum, an activation, a factor) while the result is at hand.
"""

import torch
import torch.nn.functional as F

_FLOAT_SIZE = 1 << 20  # a smaller float32 matrix gains less than the op's own overhead


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
        return weight.numel() >= _FLOAT_SIZE
    return weight.dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported())


class Linear:
    """y = x W^T + b. Weight: [out, in]. The given weight may be freed after packing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.packed = can_pack(weight)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        return self._unary(x, "none", "")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product plus `other`, which keeps its values."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias).add_(other)
        return self._binary(x, other, "add")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias).mul_(other)
        return self._binary(x, other, "mul")

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if not self.packed:
            return activate(F.linear(x, self.weight, self.bias), activation)
        if activation == "silu":
            return self._unary(x, "swish", "")
        return self._unary(x, "gelu", "tanh")

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


class GatedLinear(Linear):
    """Two products of one input, gate above up: one matrix, or two where they are packed, so that
    the activation and the product of both are done as each is computed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._halves: tuple[Linear, Linear] | None = None
        gate, up = weight.chunk(2)
        if can_pack(gate):
            biases = (None, None) if bias is None else bias.chunk(2)
            self._halves = Linear(gate, biases[0]), Linear(up, biases[1])
            self.packed, self.weight, self.bias = True, weight[:0], None
        else:
            super().__init__(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._halves is None:
            return super().__call__(x)
        return torch.cat([half(x) for half in self._halves], -1)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate, up), each its own or a view of half the columns."""
        if self._halves is None:
            gate, up = super().__call__(x).chunk(2, -1)
            return gate, up
        return self._halves[0](x), self._halves[1](x)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up"""
        if self._halves is None:
            gate, up = self.halves(x)
            return activate(gate, activation).mul_(up)
        return self._halves[1].times(x, self._halves[0].activated(x, activation))


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """In place where torch can."""
    if activation == "silu":
        return F.silu(x, inplace=True)
    return F.gelu(x, approximate="tanh")
