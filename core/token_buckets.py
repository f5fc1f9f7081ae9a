"""Token buckets in memory, of which a request takes from several at once. Not safe for threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

from msgspec import Struct

from core import compiled
from core.counters import DAY_MS, BucketState, Take

_IDLE_MS = 2 * DAY_MS
_MAX_TUPLES = 4_096  # of takes whose buckets are known


@dataclass(slots=True)
class PlainBucket:
    """`debt` is the amount taken and not yet refilled, in units times the period's milliseconds:
    each millisecond refills exactly `capacity` of it, without rounding."""

    debt: int
    at: int  # ms


# Bucket, capacity, period in ms, amount in the bucket's unit, the most debt, take. Of two
# takes from one bucket each is measured against what was taken before both.
_Row = tuple[PlainBucket, int, int, int, int, Take]


class PlainRows:
    """What is reckoned with of each bucket of a request."""

    __slots__ = ("rows",)

    def __init__(self, rows: tuple[_Row, ...]) -> None:
        self.rows = rows

    def take(self, now: int) -> tuple[list[Take], tuple[int, ...], tuple[int, ...]]:
        """Take from every bucket. Returns the takes that do not fit, because of which `give_back` may
        follow, and by bucket what remains and the milliseconds until it is full again."""
        full: list[Take] = []
        remaining: list[int] = []
        reset_ms: list[int] = []
        for bucket, capacity, period_ms, amount, most, take in self.rows:
            debt = _refilled(bucket, capacity, now)
            if debt > most:
                full.append(take)
            bucket.debt = debt = debt + amount
            left = capacity + -debt // period_ms
            remaining.append(left if left > 0 else 0)
            reset_ms.append(-(-debt // capacity))
        return full, tuple(remaining), tuple(reset_ms)

    def change(self, before: Sequence[int], amounts: Sequence[int], now: int) -> None:
        """Set the first takes to `amounts`, of which so much was taken before."""
        for row, more in zip(self.rows, map(sub, amounts, before), strict=False):
            if more == 0:
                continue
            bucket, capacity, period_ms = row[:3]
            debt = _refilled(bucket, capacity, now) + more * period_ms
            bucket.debt = debt if debt > 0 else 0


def _refilled(bucket: PlainBucket, capacity: int, now: int) -> int:
    """What the bucket owes at this moment, which it keeps."""
    debt = bucket.debt
    if bucket.at < now:
        debt -= (now - bucket.at) * capacity
        debt, bucket.at = debt if debt > 0 else 0, now
    return debt


# Which are made: those of the extension where it is built.
_NewBucket: Any = PlainBucket if compiled.Bucket is None else compiled.Bucket
_NewRows: Any = PlainRows if compiled.Rows is None else compiled.Rows


class BucketTakes(Struct, frozen=True):
    """Takes with their buckets."""

    group: str
    takes: tuple[Take, ...]
    amounts: tuple[int, ...]
    rows: PlainRows


class TokenBuckets:
    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, PlainBucket]] = {}  # by group and key
        # By group and takes, which requests of one size share.
        self._of_takes: dict[tuple[str, tuple[Take, ...]], BucketTakes] = {}

    def of(self, group: str, takes: tuple[Take, ...], now: int) -> BucketTakes:
        """The takes with their buckets, as they were left. A new one is full."""
        known = self._of_takes.get((group, takes))
        if known is not None:
            return known
        of_group = self._buckets.setdefault(group, {})
        rows: list[_Row] = []
        for take in takes:
            bucket = of_group.get(take.key)
            if bucket is None:
                bucket = of_group[take.key] = _NewBucket(0, now)
            capacity, period_ms, amount = take.capacity, take.period_ms, take.amount
            most = (capacity - amount) * period_ms
            most += sum([row[3] for row in rows if row[0] is bucket])
            rows.append((bucket, capacity, period_ms, amount * period_ms, most, take))
        if len(self._of_takes) >= _MAX_TUPLES:
            self._of_takes.clear()
        amounts = tuple([take.amount for take in takes])
        made = self._of_takes[group, takes] = BucketTakes(
            group, takes, amounts, _NewRows(tuple(rows))
        )
        return made

    def sweep(self, now: int) -> None:
        """Drop buckets unused for longer than the longest period. What `of` has given is not to be
        used afterwards."""
        self._of_takes.clear()
        for group, buckets in list(self._buckets.items()):
            left = {key: each for key, each in buckets.items() if now - each.at <= _IDLE_MS}
            if left:
                self._buckets[group] = left
            else:
                del self._buckets[group]


def give_back(of: BucketTakes) -> tuple[BucketState, ...]:
    """Undo `PlainRows.take` of the same moment; the states of the buckets after it."""
    rows = of.rows.rows
    for bucket, _, _, amount, _, _ in rows:
        bucket.debt -= amount
    states = []
    for bucket, capacity, period_ms, amount, _, take in rows:
        debt = bucket.debt
        remaining, reset = max(0, capacity + -debt // period_ms), -(-debt // capacity)
        wait = None
        if take.amount <= capacity:
            wait = max(0, -(-(debt + amount - capacity * period_ms) // capacity))
        states.append(BucketState(take.key, capacity, period_ms, remaining, reset, wait))
    return tuple(states)
