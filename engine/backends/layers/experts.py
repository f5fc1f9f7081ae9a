"""A mixture of experts on a CPU: the rows of a step grouped by expert, with one product for each group,
or one call for the whole of it where it is compiled."""

from array import array
from dataclasses import dataclass

import torch

from engine.backends.compiled.linear import takes_rows
from engine.backends.compiled.mixture import CompiledMixture, Expert
from engine.backends.layers.adapter_extras import InnerChanges
from engine.backends.layers.compiled_tables import compiled_matrix
from engine.backends.layers.linear import GatedLinear, Linear, activate
from engine.backends.layers.routing import Router


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP without its norm."""

    gate_up: GatedLinear
    down: Linear

    def __call__(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return self.down(self.gate_up.gated(x, activation))

    def changed(
        self, x: torch.Tensor, activation: str, name: str, changes: InnerChanges | None
    ) -> torch.Tensor:
        """With adapters of its matrices, which are called `name`.gate, .up and .down."""
        gate_name, up_name, down_name = (f"{name}.{part}" for part in ("gate", "up", "down"))
        if changes is None or not changes.of(gate_name, up_name, down_name):
            return self(x, activation)
        gate, up = self.gate_up.halves(x)
        changes.add_(gate_name, x, gate)
        changes.add_(up_name, x, up)
        inner = self.inner(gate, up, activation)
        return changes.add_(down_name, inner, self.down(inner))

    def inner(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return activate(gate, activation).mul_(up)


@dataclass(frozen=True, slots=True)
class ClampedMlp(Mlp):
    """gate * sigmoid(alpha * gate) * (up + 1), with a gate of at most `limit` and the other part
    within it on both sides, as gpt-oss was trained."""

    alpha: float
    limit: float

    def __call__(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return self.down(self.inner(*self.gate_up.halves(x), activation))

    def inner(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate.mul_(torch.sigmoid(gate * self.alpha)).mul_(up.add_(1))


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """The expert that every row uses, and the [1, hidden] vector, in float64, that says how much."""

    mlp: Mlp
    gate: torch.Tensor
    by_row: bool = False

    def changed(
        self, x: torch.Tensor, activation: str, name: str, changes: InnerChanges | None
    ) -> torch.Tensor:
        rows = x.double().chunk(len(x) if self.by_row else 1)
        share = torch.cat([torch.sigmoid(row @ self.gate.t()) for row in rows])
        return self.mlp.changed(x, activation, name, changes).mul_(share.to(x.dtype))


class Mixture:
    """The MLP of a layer in which each row uses the `active` experts that the router ranks highest.

    A row's result does not depend on the other rows: its experts' outputs are added in the order of
    its own ranking, whatever else each expert computes.
    """

    def __init__(
        self,
        router: Router,
        experts: list[Mlp],
        shared: Mlp | SharedMlp | None,
        active: int,
        layer: int = 0,
    ) -> None:
        self.layer = layer
        self.rows = array("q", [0] * len(experts))  # that each expert has computed
        self._router = router
        self._experts = experts
        packed = _packed(experts)
        self.compiled: CompiledMixture | None = None  # without the shared expert
        if packed is not None and router.compiled is not None:
            self.compiled = CompiledMixture(router.compiled, packed, self.rows)
        self.shared = shared
        self._active = active

    def __call__(
        self, x: torch.Tensor, activation: str, changes: InnerChanges | None = None
    ) -> torch.Tensor:
        """`changes`: of the adapters of the rows of x."""
        inside = changes is not None and changes.within("experts.")
        if self.compiled is not None and not inside and takes_rows(x):
            y = self.compiled(x, activation)
        else:
            y = self._mixed(x, activation, changes)
        if self.shared is None:
            return y
        return y.add_(self.shared.changed(x, activation, "shared", changes))

    def _mixed(
        self, x: torch.Tensor, activation: str, changes: InnerChanges | None
    ) -> torch.Tensor:
        shares, chosen = self._router(x)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        for number, count in enumerate(counts):
            self.rows[number] += count
        rows = by_expert // self._active
        out = self._each(x.index_select(0, rows), counts, activation, changes, rows)
        ranked = torch.empty_like(out).index_copy_(0, by_expert, out)
        found, parts = ranked.view(*chosen.shape, -1).double(), shares.double().unsqueeze(-1)
        y = found[:, 0] * parts[:, 0]
        for rank in range(1, self._active):  # added in one order, as `mixture.h` does
            y += found[:, rank] * parts[:, rank]
        return y.float().to(x.dtype)

    def _each(
        self, x: torch.Tensor, counts: list[int], activation: str,
        changes: InnerChanges | None, rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """One expert after the other. `rows`: the step's row of each row of x."""
        out = torch.empty_like(x)
        first = 0
        for number, count in enumerate(counts):
            if count:
                end = first + count
                among = None if changes is None else changes.among(rows[first:end])
                out[first:end] = self._experts[number].changed(
                    x[first:end], activation, f"experts.{number}", among
                )
                first = end
        return out


def _packed(experts: list[Mlp]) -> list[Expert] | None:
    """The matrices of the experts, if all are of the kind that is compiled."""
    found = []
    for each in experts:
        if isinstance(each, ClampedMlp):
            return None
        gated, down = compiled_matrix(each.gate_up), compiled_matrix(each.down)
        if gated is None or down is None or gated[1] is None:
            return None
        found.append((gated[0], gated[1], down[0]))
    kinds = {tuple((matrix.coded, matrix.kind) for matrix in each) for each in found}
    one_kind = len(kinds) == 1 and len({each.coded for each in found[0]}) == 1
    return found if one_kind else None
