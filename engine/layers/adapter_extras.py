"""What adapters change beside the sums of low rank at the layers' sites: the lengths of rows of
weights (DoRA, arXiv 2402.09353), the token table and the head. Computed for each adapter's rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.layers.linear import Linear

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rescale:
    """Outputs of a matrix of the base are multiplied by `factor` [out]; `shift` [out] gives back what
    that takes from the bias. The adapter's own sums have the factor in them."""

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
    """whole: in place of the base's. pair: [hidden, rank] and [rank, vocab]."""

    whole: Linear | None
    pair: Pair | None
    rescale: Rescale | None

    def __call__(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        y = head(x) if self.whole is None else self.whole(x)
        if self.rescale is not None:
            y = self.rescale(y)
        return y if self.pair is None else y.addmm_(x @ self.pair[0], self.pair[1])


@dataclass(frozen=True, slots=True)
class AdapterExtras:
    """One adapter's; `bytes` in host memory. Rescales are by (layer, part)."""

    rescales: Mapping[tuple[int, str], Rescale] = field(default_factory=dict)
    table: TableChange | None = None
    head: HeadChange | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Consecutive rows of a step whose adapter has extras."""

    rows: slice
    extras: AdapterExtras


def rescales(segments: list[ExtraRows], layer: int, part: str) -> Iterator[tuple[slice, Rescale]]:
    for each in segments:
        rescale = each.extras.rescales.get((layer, part))
        if rescale is not None:
            yield each.rows, rescale


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
