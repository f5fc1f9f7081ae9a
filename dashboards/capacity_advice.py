"""Advice on capacity with its evidence: what the engines' time went to, and what the cache holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.usage.tables import DailyEngineTime
from dashboards.backend import EngineView
from dashboards.tables import Column, Table

_DAYS = 7
_DAY_S = 86_400
_FULL = 0.85  # of an engine's time, beyond which requests queue at the peaks of a day
_PRESSED = 0.7  # of the cache
# Values of a head of 64 in 16 bits, against 8 bits and a scale of 32.
_MORE_BY_INT8 = 2 / (1 + 4 / 64)
COLUMNS = [
    Column("says", "Capacity"),
    Column("evidence", "Evidence"),
    Column("does", "What to do"),
]


@dataclass(frozen=True, slots=True)
class Advice:
    says: str
    evidence: str
    does: str = ""


def advice(session: Session, engines: Sequence[EngineView], now: datetime) -> list[Advice]:
    """By whole days, of which the engines' receipts say how long each request had of their steps."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    days = _busy(session, today - timedelta(days=_DAYS), today)
    found = []
    if days:
        found.append(_use(days, today))
        found += _adapters(days)
    found += _cache(engines)
    return found


@dataclass(frozen=True, slots=True)
class _Day:
    at: datetime
    busy_s: float
    adapters_s: float
    engines: int

    @property
    def share(self) -> float:
        return self.busy_s / (self.engines * _DAY_S)


def _busy(session: Session, start: datetime, end: datetime) -> list[_Day]:
    at, adapter, engine = (
        DailyEngineTime.at, DailyEngineTime.adapter, DailyEngineTime.engine_id,
    )  # fmt: skip
    query = (
        select(at, adapter != "", func.sum(DailyEngineTime.busy_us))
        .where(at >= start, at < end)
        .group_by(at, adapter != "")
    )
    counted = select(at, func.count(engine.distinct())).where(at >= start, at < end).group_by(at)
    engines = {day: int(count) for day, count in session.execute(counted)}
    sums: dict[datetime, list[float]] = {}
    for day, with_adapter, busy in session.execute(query):
        sums.setdefault(day, [0.0, 0.0])[bool(with_adapter)] += int(busy or 0) / 1e6
    return [
        _Day(day, plain + adapted, adapted, engines[day])
        for day, (plain, adapted) in sorted(sums.items())
        if plain + adapted
    ]


def _use(days: Sequence[_Day], today: datetime) -> Advice:
    last = days[-1]
    says = f"{100 * last.share:.0f} % of the engines' time was used on {last.at:%Y-%m-%d}"
    evidence = f"{last.busy_s:,.0f} s of {last.engines} × {_DAY_S:,} s, by the receipts of requests"
    growth = _growth(days)
    if last.share >= _FULL:
        return Advice(says, evidence, "Add a replica: peaks of a day queue at this use.")
    if growth <= 0:
        return Advice(says, evidence, "Nothing: the use does not grow.")
    left = (_FULL - last.share) / growth
    when = last.at + timedelta(days=min(left, 3650.0))
    evidence += f"; it grew by {100 * growth:.1f} points a day over {len(days)} days"
    return Advice(
        says, evidence, f"Plan the next replica for {when:%Y-%m-%d}, at {100 * _FULL:.0f} %."
    )


def _growth(days: Sequence[_Day]) -> float:
    """Of the share, a day: the slope of least squares; 0 with fewer than three days."""
    if len(days) < 3:
        return 0.0
    places = [(each.at - days[0].at).total_seconds() / _DAY_S for each in days]
    middle = sum(places) / len(places)
    mean = sum(each.share for each in days) / len(days)
    spread = sum((place - middle) ** 2 for place in places)
    return (
        sum(
            (place - middle) * (each.share - mean) for place, each in zip(places, days, strict=True)
        )
        / spread
    )


def _adapters(days: Sequence[_Day]) -> list[Advice]:
    last = days[-1]
    if not last.adapters_s:
        return []
    share = last.adapters_s / last.busy_s
    return [
        Advice(
            f"Requests with adapters take {100 * share:.0f} % of the steps",
            f"{last.adapters_s:,.0f} of {last.busy_s:,.0f} s on {last.at:%Y-%m-%d}",
            "Merge an adapter that most requests use: `tollhouse adapter merge`."
            if share > 0.5
            else "",
        )
    ]


def _cache(engines: Sequence[EngineView]) -> list[Advice]:
    used, total = sum(e.blocks_used for e in engines), sum(e.blocks_total for e in engines)
    if not total or used / total < _PRESSED:
        return []
    return [
        Advice(
            f"{100 * used / total:.0f} % of the cache is in use",
            f"{used:,} of {total:,} blocks now; preemptions start above about 85 %",
            f"Where it is not set yet, `--kv-dtype int8` fits {_MORE_BY_INT8:.1f} times as many "
            "sequences.",
        )
    ]


def table(found: Sequence[Advice]) -> Table:
    rows = [{"says": each.says, "evidence": each.evidence, "does": each.does} for each in found]
    return Table(
        "Capacity",
        COLUMNS,
        rows,
        totals=False,
        empty="No engine time of a whole day is recorded yet.",
        next_step=("/operator/plan", "Plan devices"),
    )
