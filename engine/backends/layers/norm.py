"""Norms on a CPU: by the compiled kernel, or with the fewest torch calls for each number of rows."""

import math

import torch
import torch.nn.functional as F

from engine.backends.compiled.pointwise import is_compiled, norm_heads_, normed

_FEW_ROWS = 64


class RmsNorm:
    """x / rms(x) * weight over the last dimension.

    `unit_offset` multiplies by 1 + weight in full precision, as Gemma was trained. `by_row`: any number
    of rows is computed in the same way.
    """

    def __init__(
        self, weight: torch.Tensor, eps: float, unit_offset: bool = False, by_row: bool = False
    ) -> None:
        self.weight = weight.float() + 1 if unit_offset else weight
        self.eps = eps
        self._size = weight.shape[0]
        self._shape = (self._size,)
        self._doubled = torch.cat((self.weight, self.weight))
        self._zeros = torch.zeros_like(self.weight)
        self._widen = unit_offset and weight.dtype != torch.float32
        self._by_row = by_row
        self.floats = self.weight.float().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if is_compiled(x):
            return normed(x, self.floats, self.eps)
        if self._by_row:
            return self._few(x.float() if self._widen else x).to(x.dtype)
        if self._widen:
            return F.rms_norm(x.float(), self._shape, self.weight, self.eps).to(x.dtype)
        if x.dim() == 2 and x.shape[0] <= _FEW_ROWS:
            return self._one(x) if x.shape[0] == 1 else self._few(x)
        return self._many(x) if x.dim() == 2 else F.rms_norm(x, self._shape, self.weight, self.eps)

    def of_heads_(self, x: torch.Tensor) -> None:
        """In place. x: [rows, heads, dim], the heads of part of a row."""
        if is_compiled(x[:, 0]) and x.stride(1) == x.shape[2]:
            norm_heads_(x, self.floats, self.eps)
        else:
            x.copy_(self(x))

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the factor on the host, then one fused product."""
        length = torch.linalg.vector_norm(x, dtype=torch.float32).item()
        factor = 1.0 / math.sqrt(length * length / self._size + self.eps)
        return torch.addcmul(self._zeros, x, self.weight, value=factor)

    def _few(self, x: torch.Tensor) -> torch.Tensor:
        """The layer norm of (x, -x), whose mean is zero and whose variance is the mean square. It
        is one fused call where torch's RMS norm is eight, which dominate for few rows."""
        both = torch.cat((x, -x), -1)
        normed = F.layer_norm(both, (2 * self._size,), self._doubled, None, self.eps)
        return normed[..., : self._size]

    def _many(self, x: torch.Tensor) -> torch.Tensor:
        """A batch norm with the rows as channels of mean zero: one pass over many rows, where
        torch's RMS norm makes float32 copies of all of them."""
        length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        square = length.square_().div_(self._size)
        normed = F.batch_norm(x[None], torch.zeros_like(square), square, eps=self.eps)[0]
        return normed.mul_(self.weight)


class LayerNorm(RmsNorm):
    """The RMS norm of x minus its mean, plus `bias`. The weight may be a matrix, with a row for each
    head; then there is no bias."""

    def __init__(self, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def of_heads_(self, x: torch.Tensor) -> None:
        x.copy_(self(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.dim() == 1:
            return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)
        return F.layer_norm(x, weight.shape[1:], None, None, self.eps).mul_(weight)
