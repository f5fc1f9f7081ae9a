"""Mixtures of experts by the compiled kernel: one call where torch sorts rows, and calls each expert."""

import struct
from array import array
from collections.abc import Sequence

import torch

from engine.backends.compiled.linear import KINDS, CompiledMatrix, compiled, has_kernel
from engine.model_spec import ExpertsSpec

Expert = tuple[CompiledMatrix, CompiledMatrix, CompiledMatrix]  # up, gate, down


class CompiledRouter:
    """Ranks experts by a softmax of scores in float64, each row by itself."""

    def __init__(
        self, spec: ExpertsSpec, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """weight: float64 [experts, hidden]; bias: float64 [experts]."""
        self._spec = spec
        self._kept = weight.contiguous(), bias
        self.table = self.with_experts(0, 0, 0, coded=False)

    def with_experts(self, matrices: int, counts: int, inner: int, *, coded: bool) -> torch.Tensor:
        """What `mixture.h` reads of a layer: the addresses of its experts' matrices and counts."""
        (weight, bias), spec = self._kept, self._spec
        factor = struct.unpack("<q", struct.pack("<fi", spec.factor, 0))[0]
        return torch.tensor([
            weight.data_ptr(), 0 if bias is None else bias.data_ptr(), matrices, counts,
            *weight.shape[:1], spec.active, *weight.shape[1:], inner, spec.normed, factor, coded,
        ])  # fmt: skip

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The share, of x's type, and the number of each row's experts: [rows, active]."""
        x, shape = x.contiguous(), (len(x), self._spec.active)
        shares, chosen = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        compiled().route(
            self.table.data_ptr(), x.data_ptr(), shares.data_ptr(), chosen.data_ptr(), len(x),
            x.dtype is torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return shares.to(x.dtype), chosen


class CompiledMixture:
    def __init__(
        self, router: CompiledRouter, experts: Sequence[Expert], counts: "array[int]"
    ) -> None:
        """counts: of the rows that each expert has computed, which are added to."""
        self._kept = router, experts, counts  # as long as their addresses are used
        self._matrices = torch.tensor(
            [[place for matrix in each for place in matrix.places] for each in experts]
        )
        addresses = self._matrices.data_ptr(), counts.buffer_info()[0]
        first = experts[0][0]
        self.table = router.with_experts(*addresses, first.out, coded=first.coded)

    def __call__(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x: [rows, hidden]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        compiled().mix(
            self.table.data_ptr(), x.data_ptr(), out.data_ptr(), len(x), x.dtype is torch.bfloat16,
            KINDS[activation], torch.get_num_threads(),
        )  # fmt: skip
        return out


def can_route(spec: ExpertsSpec, weight: torch.Tensor, correction: torch.Tensor | None) -> bool:
    usual = not spec.sigmoid and spec.groups == 1 and correction is None
    return has_kernel() and usual and weight.device.type == "cpu"
