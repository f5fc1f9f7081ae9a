"""Linear layers over quantised matrices: the compiled kernel, or torch where it is not built.

Rows are quantised to 8 bits in groups of 32 and multiplied as integers, as llama.cpp does. Measured on a
2-core AVX-512 machine, torch's own 4-bit and 8-bit products are slower than its float ones for matrices
of this size, and FBGEMM's dynamic product shares one range over the batch.
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from engine.layers.linear import activate
from engine.quantization.packed import GROUP, Packed

_INTERFACE = 2  # of kernel.c
try:
    from engine.quantization import _kernel as kernel
except ImportError:  # built without a C compiler
    kernel = None  # type: ignore[assignment]
if getattr(kernel, "INTERFACE", 0) != _INTERFACE:  # built by an earlier version
    kernel = None  # type: ignore[assignment]

_KERNEL_TYPES = (torch.float32, torch.bfloat16)


def has_kernel() -> bool:
    return kernel is not None


def kernel_for(dtype: torch.dtype) -> ModuleType | None:
    """The compiled functions, where they are built and take rows of this type."""
    return kernel if dtype in _KERNEL_TYPES else None


class QuantizedMatrix:
    """One packed matrix and its product."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.kernel_matrix = None
        if kernel is not None:
            arrays = (packed.codes, packed.scales, packed.minima, packed.factors, packed.bias)
            codes, scales, minima, factors, bias = (
                None if each is None else each.numpy() for each in arrays
            )
            assert codes is not None and scales is not None and factors is not None
            self.kernel_matrix = kernel.Matrix(
                (codes, scales, minima, factors, bias), packed.out, -(-packed.width // GROUP),
                packed.bits, packed.group, packed.zero,
            )  # fmt: skip

    def into(self, x: torch.Tensor, out: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """out = x W^T + b (+ other). The last dimension of all is contiguous."""
        if self.kernel_matrix is None or x.dtype not in _KERNEL_TYPES:
            product = self.packed.product(x)
            out.copy_(product if other is None else product + other)
            return
        x = self.packed.sorted(x)
        kernel.product(
            self.kernel_matrix, _rows(x), _rows(out), None if other is None else _rows(other),
            x.shape[1], x.shape[0], x.dtype is torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip


class QuantizedLinear:
    """Implements `engine.layers.linear.Linear` over matrices of one input, whose outputs follow each
    other; each may have a format of its own."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        self._parts = [QuantizedMatrix(part) for part in parts]
        self._out = sum(part.out for part in parts)

    @property
    def parts(self) -> list[Packed]:
        return [part.packed for part in self._parts]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, None)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._product(x, other)

    def _product(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        x = _checked(x, self._parts[0].packed.width)
        out = x.new_empty(x.shape[0], self._out)
        if other is not None and (other.shape != out.shape or other.dtype != out.dtype):
            raise ValueError(f"{tuple(other.shape)} cannot be added to {tuple(out.shape)}")
        if other is not None and other.stride(1) != 1:
            other = other.contiguous()
        if len(self._parts) == 1:
            self._parts[0].into(x, out, other)
            return out
        first = 0
        for part in self._parts:
            end = first + part.packed.out
            part.into(x, out[:, first:end], None if other is None else other[:, first:end])
            first = end
        return out


class QuantizedGatedLinear:
    """Implements `engine.layers.linear.GatedLinear`."""

    def __init__(self, gate: Packed, up: Packed) -> None:
        self._halves = QuantizedLinear([gate]), QuantizedLinear([up])
        self._gate, self._up = (half._parts[0] for half in self._halves)
        same = (gate.bits, gate.group, gate.zero) == (up.bits, up.group, up.zero)
        if gate.order is None or up.order is None:
            same = same and gate.order is up.order
        else:
            same = same and torch.equal(gate.order, up.order)
        self._fused = same and self._gate.kernel_matrix is not None

    @property
    def parts(self) -> list[Packed]:
        return [self._gate.packed, self._up.packed]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.halves(x), -1)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._halves[0](x), self._halves[1](x)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if not self._fused or x.dtype not in _KERNEL_TYPES:
            gate, up = self.halves(x)
            return activate(gate, activation).mul_(up)
        x = self._up.packed.sorted(_checked(x, self._up.packed.width))
        out = x.new_empty(x.shape[0], self._up.packed.out)
        gate_matrix, up_matrix = self._gate.kernel_matrix, self._up.kernel_matrix
        assert gate_matrix is not None and up_matrix is not None
        kernel.gated(
            gate_matrix, up_matrix, _rows(x), _rows(out), x.shape[1], x.shape[0],
            x.dtype is torch.bfloat16, torch.get_num_threads(), activation != "silu",
        )  # fmt: skip
        return out


class QuantizedEmbedding:
    """Implements `engine.layers.embedding.Embedding`: reads the rows of a packed matrix."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self.packed = packed
        self._dtype = dtype

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(tokens).to(self._dtype)


def _checked(x: torch.Tensor, width: int) -> torch.Tensor:
    """The rows in a form that the kernel can read. Raises ValueError for rows of another width."""
    if x.dim() != 2 or x.shape[1] != width or x.device.type != "cpu":
        raise ValueError(f"rows of {width} values on the CPU are needed, not {tuple(x.shape)}")
    return x if x.stride(1) == 1 else x.contiguous()


def _rows(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.stride(0)
