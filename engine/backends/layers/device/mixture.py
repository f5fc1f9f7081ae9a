"""A mixture of experts on a GPU: their matrices stacked, and what each row gets by torch."""

from dataclasses import dataclass

import torch

from engine.backends.layers.device.linear import product_reference
from engine.backends.layers.device.matrix import DeviceMatrix, expert_of
from engine.backends.layers.experts import Mlp, SharedMlp
from engine.backends.layers.linear import activate
from engine.backends.layers.routing import Router


@dataclass(slots=True)
class DeviceMixture:
    """The MLP of a layer in which each row uses the `active` experts that the router ranks highest.
    A row's outputs are added in the order of its own ranking, whatever else each expert computes."""

    layer: int
    router: Router
    gate_up: DeviceMatrix  # of all experts: the gates' outputs, then the others
    down: DeviceMatrix
    shared: Mlp | SharedMlp | None
    active: int
    clamp: tuple[float, float] | None = None  # of `layers.experts.ClampedMlp`: alpha and limit
    load: torch.Tensor | None = None  # [experts] int64: rows that each has computed

    @property
    def count(self) -> int:
        return self.gate_up.codes.shape[0]

    @property
    def bytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes


def mixture_reference(mixture: DeviceMixture, x: torch.Tensor, activation: str) -> torch.Tensor:
    """Without the shared expert, row by row: [rows, hidden]."""
    shares, chosen = mixture.router(x)
    out = torch.zeros_like(x)
    for row, numbers in enumerate(chosen.tolist()):
        for rank, number in enumerate(numbers):
            both = product_reference(
                x[row : row + 1], expert_of(mixture.gate_up, number), rounded=False
            )
            inner = gated_reference(both, activation, mixture.clamp)
            down = product_reference(inner, expert_of(mixture.down, number), rounded=False)
            out[row] += shares[row, rank] * down[0]
    return out


def gated_reference(
    both: torch.Tensor, activation: str, clamp: tuple[float, float] | None
) -> torch.Tensor:
    gate, up = both.float().chunk(2, -1)
    if clamp is None:
        found = activate(gate.clone(), activation) * up
    else:
        alpha, limit = clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        found = gate * torch.sigmoid(gate * alpha) * (up + 1)
    return found.to(both.dtype)
