"""Cuts a step's sorted rows into groups of stack slots, each of which is one batched product."""

from dataclasses import dataclass
from itertools import groupby

import torch

from engine.backends.layers.lora import Group

# Most padded rows of a group: _PAD_SHARE times its real rows plus _PAD_ROWS.
_PAD_SHARE = 4
_PAD_ROWS = 32


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive token rows of one slot."""

    slot: int
    first: int
    count: int


def plan_groups(row_keys: list[tuple[int, int, int]], first: int, pad: bool) -> list[Group]:
    """places: (rank, slot, tokens) of each row in order, rank 0 for the base model's rows.

    `pad` allows slots with different row counts in one group, which pays when counts are small.
    """
    groups: list[Group] = []
    for rank, of_rank in groupby(row_keys, key=lambda item: item[0]):
        segments = []
        for slot, of_slot in groupby(of_rank, key=lambda item: item[1]):
            count = sum(tokens for _, _, tokens in of_slot)
            segments.append(_Segment(slot, first, count))
            first += count
        if rank:
            groups += _padded(rank, segments) if pad else _exact(rank, segments)
    return groups


def _exact(rank: int, segments: list[_Segment]) -> list[Group]:
    """Adjacent slots with equal counts in one group, every other slot in its own."""
    runs: list[list[_Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.slot + 1, last.count) == (segment.slot, segment.count):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    groups = []
    for run in runs:
        one, last = run[0], run[-1]
        slots = slice(one.slot, last.slot + 1)
        groups.append(Group(rank, slots, one.count, one.first, last.first + last.count))
    return groups


def _padded(rank: int, segments: list[_Segment]) -> list[Group]:
    """One group; or, with too much padding, the busiest slot alone and the groups on its sides."""
    if not segments:
        return []
    low, high = segments[0].slot, segments[-1].slot
    width = max(segment.count for segment in segments)
    total = sum(segment.count for segment in segments)
    padded = (high - low + 1) * width
    if padded == total:
        return _exact(rank, segments)
    if padded > _PAD_SHARE * total + _PAD_ROWS:
        busiest = max(range(len(segments)), key=lambda n: segments[n].count)
        left, right = segments[:busiest], segments[busiest + 1 :]
        if left or right:
            alone = _exact(rank, [segments[busiest]])
            return [*_padded(rank, left), *alone, *_padded(rank, right)]
    first = segments[0].first
    gather = torch.full((high - low + 1, width), first)
    scatter: list[int] = []
    for segment in segments:
        at = segment.slot - low
        gather[at, : segment.count] = torch.arange(segment.first, segment.first + segment.count)
        scatter += range(at * width, at * width + segment.count)
    slots, end = slice(low, high + 1), first + total
    return [Group(rank, slots, width, first, end, gather.flatten(), torch.tensor(scatter))]
