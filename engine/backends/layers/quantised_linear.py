"""Linear layers over quantised matrices: the compiled kernel, or torch where it is not built.

Rows are quantised to 8 bits in groups of 32 and multiplied as integers, as llama.cpp does. Measured on a
2-core AVX-512 machine, torch's own 4-bit and 8-bit products are slower than its float ones for matrices
of this size, and FBGEMM's dynamic product shares one range over the batch.
"""

from collections.abc import Sequence

import torch

from engine.backends.compiled import linear as dense
from engine.backends.layers.linear import activate
from engine.backends.layers.packed import GROUP, Packed


class QuantizedMatrix:
    """One packed matrix and its product. Implements `CompiledMatrix` where the
    kernel is there."""

    coded = True

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.out, self.width = packed.out, packed.width
        minima = packed.minima is not None
        self.kind: tuple[int, ...] = (packed.bits, packed.group, packed.zero, minima)
        self.places = 0, 0 if packed.bias is None else packed.bias.data_ptr()
        if dense.has_kernel():
            arrays = (packed.codes, packed.scales, packed.minima, packed.factors)
            self._kept = dense.compiled().Matrix(
                tuple(None if each is None else each.numpy() for each in arrays), packed.out,
                -(-packed.width // GROUP), packed.bits, packed.group, packed.zero,
            )  # fmt: skip
            self.places = self._kept.address, self.places[1]

    @property
    def listed(self) -> bool:
        """Whether the kernel reads rows for it as they are."""
        return bool(self.places[0]) and self.packed.order is None

    def into(self, x: torch.Tensor, out: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """out = x W^T + b (+ other). The last dimension of all is contiguous."""
        if not self.places[0] or x.dtype not in dense.DTYPES:
            product = self.packed.product(x)
            out.copy_(product if other is None else product + other)
            return
        dense.multiply_into(self.packed.sorted(x), [(self, None, 0, len(x))], out, other)


class QuantizedLinear:
    """Implements `Linear` over matrices of one input, whose outputs follow each
    other; each may have a format of its own."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        self._parts = [QuantizedMatrix(part) for part in parts]
        self._out = sum(part.out for part in parts)
        self.table: dense.SiteTable | None = None  # what the kernel reads, if it does
        if all(part.listed for part in self._parts):
            self.table = dense.SiteTable([(part, None) for part in self._parts])

    @property
    def parts(self) -> list[Packed]:
        return [part.packed for part in self._parts]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, None)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._product(x, other)

    def _product(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        x = dense.checked(x, self._parts[0].packed.width)
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
    """Implements `engine.backends.layers.linear.GatedLinear`."""

    def __init__(self, gate: Packed, up: Packed) -> None:
        self._halves = QuantizedLinear([gate]), QuantizedLinear([up])
        self._gate, self._up = (half._parts[0] for half in self._halves)
        same = self._gate.kind == self._up.kind
        if gate.order is None or up.order is None:
            same = same and gate.order is up.order
        else:
            same = same and torch.equal(gate.order, up.order)
        self._fused = same and dense.has_kernel()
        self.table: dense.SiteTable | None = None  # what the kernel reads, if it does
        if self._fused and self._up.listed:
            self.table = dense.SiteTable([(self._up, self._gate)])

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
        if not self._fused or x.dtype not in dense.DTYPES:
            gate, up = self.halves(x)
            return activate(gate, activation).mul_(up)
        x = self._up.packed.sorted(dense.checked(x, self._up.width))
        return dense.grouped_product(x, [(self._up, self._gate, 0, len(x))], activation)


class QuantizedEmbedding:
    """Implements `engine.backends.layers.embedding.Embedding`: reads the rows of a packed matrix."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self.packed = packed
        self._dtype = dtype

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(tokens).to(self._dtype)
