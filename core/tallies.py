"""Prometheus metrics that the event loop counts as plain numbers, folded in when they are read.

A request counts a dozen times. For each, prometheus_client takes a lock, checks the labels and, where
several processes share their metrics, writes to a file. Here a count is one addition; a scrape folds
what was added since the last one, and processes that share metrics fold every second (`fold_all`).

Only one thread of a process may count; any may read.
"""

from bisect import bisect_left
from collections.abc import Iterable
from threading import Lock
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

_lock = Lock()  # one fold at a time
_all: "list[_Tally]" = []


def fold_all() -> None:
    with _lock:
        for each in _all:
            each.fold()


class _Tally(MetricWrapperBase):
    def _metric_init(self) -> None:
        super()._metric_init()  # type: ignore[no-untyped-call]
        # Of all time: a fold resets nothing to which a count may be adding.
        self._counted: float = 0
        self._folded: float = 0
        _all.append(self)

    def fold(self) -> None:
        value: Any = self._value  # type: ignore[attr-defined]
        counted = self._counted
        if counted != self._folded:
            value.inc(counted - self._folded)
            self._folded = counted

    def _child_samples(self) -> Iterable[Sample]:
        with _lock:
            self.fold()
        return super()._child_samples()


class TallyCounter(_Tally, Counter):
    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self._counted += amount


class TallyGauge(_Tally, Gauge):
    """Counts up and down, and is set to nothing."""

    def inc(self, amount: float = 1) -> None:
        self._counted += amount

    def dec(self, amount: float = 1) -> None:
        self._counted -= amount


class TallyHistogram(_Tally, Histogram):
    def _metric_init(self) -> None:
        super()._metric_init()
        self._by_bucket = [0] * len(self._upper_bounds)
        self._folded_by_bucket = list(self._by_bucket)

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._counted += amount
        self._by_bucket[bisect_left(self._upper_bounds, amount)] += 1

    def fold(self) -> None:
        counted, by_bucket = self._counted, list(self._by_bucket)
        self._sum.inc(counted - self._folded)
        for bucket, now, before in zip(
            self._buckets, by_bucket, self._folded_by_bucket, strict=True
        ):
            if now != before:
                bucket.inc(now - before)
        self._folded, self._folded_by_bucket = counted, by_bucket
