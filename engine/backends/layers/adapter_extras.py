"""What adapters change in addition to low-rank updates of the layers: the lengths of rows of
weights (DoRA, arXiv 2402.09353), the token table, the head, experts, and latent attention. Computed for
each adapter's rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from engine.backends.layers.linear import DenseLinear, Linear

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rescale:
    """Outputs of a matrix of the base are multiplied by `factor` [out]; `shift` [out] gives back what
    that takes from the bias, and makes it the adapter's own if that has one. The adapter's own sums
    have the factor in them."""

    factor: torch.Tensor
    shift: torch.Tensor | None = None

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """In place. y: [rows, out]"""
        y.mul_(self.factor)
        return y if self.shift is None else y.add_(self.shift)


@dataclass(frozen=True, slots=True)
class TableChange:
    """whole: [vocab, hidden], in place of the base's. pair: [vocab, rank] and [rank, hidden]."""

    whole: torch.Tensor | None
    pair: Pair | None
    rescale: Rescale | None

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x: the base's rows for these tokens, which are not changed."""
        x = x.clone() if self.whole is None else F.embedding(tokens, self.whole)
        if self.rescale is not None:
            x = self.rescale(x)
        return x if self.pair is None else x.addmm_(F.embedding(tokens, self.pair[0]), self.pair[1])


@dataclass(frozen=True, slots=True)
class HeadChange:
    """whole: [vocab, hidden], in place of the base's; on a CPU a linear, packed for the processor.
    pair: [hidden, rank] and [rank, vocab]."""

    whole: torch.Tensor | Linear | None
    pair: Pair | None
    rescale: Rescale | None

    def packed(self) -> "HeadChange":
        whole = self.whole
        return replace(self, whole=DenseLinear(whole)) if isinstance(whole, torch.Tensor) else self

    def __call__(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        whole = self.whole
        if isinstance(whole, torch.Tensor):
            y = F.linear(x, whole)
        else:
            y = head(x) if whole is None else whole(x)
        if self.rescale is not None:
            y = self.rescale(y)
        return y if self.pair is None else y.addmm_(x @ self.pair[0], self.pair[1])


@dataclass(frozen=True, slots=True)
class AdapterExtras:
    """One adapter's; `bytes` in host memory. Rescales are by (layer, part); pairs, A [rank, in] and
    B [rank, out] with the scale in it, by (layer, name of a module inside the layer's operations)."""

    rescales: Mapping[tuple[int, str], Rescale] = field(default_factory=dict)
    pairs: Mapping[tuple[int, str], Pair] = field(default_factory=dict)
    table: TableChange | None = None
    head: HeadChange | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Consecutive rows of a step whose adapter has extras."""

    rows: slice
    extras: AdapterExtras


@dataclass(frozen=True, slots=True)
class InnerChanges:
    """What the adapters of some rows change inside one layer's operations."""

    layer: int
    segments: list[ExtraRows]

    def pairs(self, name: str) -> Iterator[tuple[slice, Pair]]:
        for each in self.segments:
            pair = each.extras.pairs.get((self.layer, name))
            if pair is not None and each.rows.start < each.rows.stop:
                yield each.rows, pair

    def add_(self, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [rows, out], the base's products with x, become those of each row's adapter."""
        for rows, (a, b) in self.pairs(name):
            y[rows] += (x[rows] @ a.t()) @ b
        return y

    def within(self, prefix: str) -> bool:
        """Whether any module whose name begins so is changed for any row."""
        return any(
            layer == self.layer and name.startswith(prefix)
            for each in self.segments
            for layer, name in each.extras.pairs
        )

    def among(self, chosen: torch.Tensor) -> "InnerChanges":
        return InnerChanges(self.layer, among(self.segments, chosen))

    def of(self, *names: str) -> bool:
        """Whether any of these modules is changed for any row."""
        return any(True for name in names for _ in self.pairs(name))


def inner_changes(segments: list[ExtraRows], layer: int) -> InnerChanges | None:
    """None if no row's adapter changes anything inside an operation."""
    some = [each for each in segments if each.extras.pairs]
    return InnerChanges(layer, some) if some else None


def rescales(segments: list[ExtraRows], layer: int, part: str) -> Iterator[tuple[slice, Rescale]]:
    for each in segments:
        rescale = each.extras.rescales.get((layer, part))
        if rescale is not None and each.rows.start < each.rows.stop:
            yield each.rows, rescale


def rescaled_sum(
    linear: Linear, y: torch.Tensor, x: torch.Tensor, changed: list[tuple[slice, Rescale]]
) -> torch.Tensor:
    """x + y W^T, in which the products of the changed rows, in a second product, are
    rescaled first."""
    rows = torch.cat([torch.arange(each.start, each.stop) for each, _ in changed])
    whole = len(rows) == len(y)
    products = linear(y if whole else y.index_select(0, rows))
    first = 0
    for each, rescale in changed:
        end = first + each.stop - each.start
        rescale(products[first:end])
        first = end
    if whole:
        return products.add_(x)
    out = linear.plus(y, x)
    return out.index_copy_(0, rows, products.add_(x.index_select(0, rows)))


def change_table(segments: list[ExtraRows], tokens: torch.Tensor, x: torch.Tensor) -> None:
    """In place. x: [tokens, hidden], the rows of the base's table."""
    for each in segments:
        if each.extras.table is not None:
            x[each.rows] = each.extras.table(tokens[each.rows], x[each.rows])


def head_of_rows(segments: list[ExtraRows], head: Linear, x: torch.Tensor) -> torch.Tensor:
    """The logits [rows, vocab] of normed states x, each by the head of its adapter."""
    changed = [(each.rows, each.extras.head) for each in segments if each.extras.head is not None]
    if len(changed) == 1 and changed[0][0] == slice(0, len(x)):
        return changed[0][1](x, head)
    logits = head(x)
    for rows, change in changed:
        if rows.start < rows.stop:
            logits[rows] = change(x[rows], head)
    return logits


def among(segments: list[ExtraRows], chosen: torch.Tensor) -> list[ExtraRows]:
    """The segments within the rows `chosen`, whose numbers rise."""
    found = []
    for each in segments:
        ends = torch.searchsorted(chosen, torch.tensor([each.rows.start, each.rows.stop])).tolist()
        found.append(ExtraRows(slice(*ends), each.extras))
    return found
