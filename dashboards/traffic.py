"""Requests of all tenants in the last minutes or hours: errors by cause, waiting, speed, cache hits.

Read from usage events, so a request counts when it has ended and was shipped. Requests that were
refused before admission (a wrong key, a limit) leave no event; `tollhouse_rejections_total` counts them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from billing.usage.service_rollups import percentile
from billing.usage.tables import FIRST_TOKEN_MS, UsageEventRow
from core.events import SettledBy, UsageKind
from core.ids import REQUEST, floor_id

_SUMMED = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens", "queue_ms")


@dataclass(slots=True)
class Traffic:
    """Sums of one group of requests."""

    requests: int = 0
    refused: int = 0  # status 4xx
    failed: int = 0  # status 5xx
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))
    first_token: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_MS) + 1))

    @property
    def failed_share(self) -> float:
        """Of the requests that were not the client's own mistake."""
        accepted = self.requests - self.refused
        return self.failed / accepted if accepted else 0.0

    @property
    def cached_share(self) -> float | None:
        total = self.tokens["input_tokens"]
        return self.tokens["cached_tokens"] / total if total else None

    def first_token_ms(self, share: float) -> float | None:
        return percentile(self.first_token, FIRST_TOKEN_MS, share)


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Requests that share model, adapter, engine, status, reason and class of first-token time."""

    model: str
    adapter: str
    engine_id: str
    status: int
    finish_reason: str
    first_token_class: int | None  # index into FIRST_TOKEN_MS; None: no token was sent
    requests: int
    sums: tuple[int, ...]  # in the order of _SUMMED


def read(session: Session, start: datetime, end: datetime) -> list[TrafficRow]:
    """By the time at which requests arrived; the ids' range keeps the query within its partitions."""
    event: Any = UsageEventRow
    group = [
        event.model,
        func.coalesce(event.adapter, ""),
        event.engine_id,
        event.status,
        event.finish_reason,
        _first_token_class(event.first_token_ms),
    ]
    sums = [func.sum(getattr(event, name)) for name in _SUMMED]
    found = session.execute(
        select(*group, func.count(), *sums)
        .where(
            event.request_id >= floor_id(REQUEST, start), event.request_id < floor_id(REQUEST, end)
        )
        .where(event.kind != UsageKind.GPU_SECONDS, event.settled_by != SettledBy.REPORTED)
        .group_by(*group)
    )
    return [
        TrafficRow(*row[:6], int(row[6]), tuple(int(each or 0) for each in row[7:]))
        for row in found
    ]


def total(rows: Iterable[TrafficRow]) -> Traffic:
    made = Traffic()
    for row in rows:
        made.requests += row.requests
        made.refused += row.requests if 400 <= row.status < 500 else 0
        made.failed += row.requests if row.status >= 500 else 0
        for name, value in zip(_SUMMED, row.sums, strict=True):
            made.tokens[name] += value
        if row.first_token_class is not None:
            made.first_token[row.first_token_class] += row.requests
    return made


def grouped_by(rows: Iterable[TrafficRow], key: Callable[[TrafficRow], str]) -> dict[str, Traffic]:
    """By name, the most requests first."""
    groups: dict[str, list[TrafficRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    totals = {name: total(members) for name, members in groups.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1].requests, item[0])))


def _first_token_class(value: Any) -> Any:
    """Upper bounds are inclusive, as in the service roll-ups."""
    steps = [(value <= bound, index) for index, bound in enumerate(FIRST_TOKEN_MS)]
    return case((value.is_(None), None), *steps, else_=len(FIRST_TOKEN_MS))
