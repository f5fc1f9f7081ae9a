"""Sums of charges by hour and by day, kept up by rating and rebuilt from the charges on demand."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Table, delete, func, select
from sqlalchemy.orm import Session

from billing import bulk, partitions
from billing.models import Charge, DailyUsage, HourlyUsage, UsageEventRow
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS

HOURLY: Table = HourlyUsage.__table__  # type: ignore[assignment]
DAILY: Table = DailyUsage.__table__  # type: ignore[assignment]
KEY = (
    "tenant_id",
    "at",
    "project_id",
    "key_id",
    "model",
    "adapter",
    "kind",
    "price_version",
    "usage_period_id",
    "bill_period_id",
)
SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
_COLUMNS = (*KEY, "currency", *SUMS)
_FIRST_SUM = 7  # of a charge's row, after its names
Sums = dict[tuple[Any, ...], list[int]]


def add_charges(session: Session, rated: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    """Add new charges to their hours and days. Hold the tenants' locks."""
    hours: Sums = {}
    for event, charge in rated:
        _, tenant_id, project_id, key_id, kind, model, adapter, version, at, *_ = event
        key = (
            tenant_id,
            hour_of(at),
            project_id,
            key_id,
            model,
            adapter or "",
            kind,
            version,
            charge[4],
            charge[5],
            charge[3],
        )
        sums = hours.get(key)
        if sums is None:
            hours[key] = list(charge[_FIRST_SUM:])
        else:
            for index, value in enumerate(charge[_FIRST_SUM:]):
                sums[index] += value
    _add(session, HOURLY, hours)
    _add(session, DAILY, by_day(hours))


def rebuild(session: Session) -> tuple[int, int]:
    """Make both tables anew from events and charges; returns their numbers of rows. Where retention
    has dropped events, from the second day that is kept on.
    """
    dropped = partitions.kept_from(session)
    start = dropped.kept_from + timedelta(days=1) if dropped else datetime.min.replace(tzinfo=UTC)
    hours = {key: sums for key, sums in from_charges(session).items() if key[1] >= start}
    days = by_day(hours)
    for table, sums in ((HOURLY, hours), (DAILY, days)):
        session.execute(delete(table).where(table.c.at >= start))
        _add(session, table, sums)
    return len(hours), len(days)


def from_charges(session: Session) -> Sums:
    """Hourly sums as the charges themselves say, grouped by the database."""
    event, charge = UsageEventRow, Charge
    dialect = session.get_bind().dialect.name
    if dialect == "postgresql":
        hour: Any = func.date_trunc("hour", event.occurred_at)
    else:
        hour = func.strftime("%Y-%m-%d %H:00:00+00:00", event.occurred_at)
    names = (
        event.tenant_id,
        hour,
        event.project_id,
        event.key_id,
        event.model,
        func.coalesce(event.adapter, ""),
        event.kind,
        event.price_version,
        charge.usage_period_id,
        charge.bill_period_id,
        charge.currency,
    )
    sums = [func.sum(getattr(charge, name)) for name in SUMS]
    rows = session.execute(
        select(*names, *sums).join(charge, charge.request_id == event.request_id).group_by(*names)
    )
    found: Sums = {}
    for row in rows:
        moment = row[1] if isinstance(row[1], datetime) else datetime.fromisoformat(row[1])
        key = (row[0], moment, *row[2 : len(names)])
        found[key] = [int(value) for value in row[len(names) :]]
    return found


def by_day(hours: Sums) -> Sums:
    days: Sums = {}
    for key, values in hours.items():
        day = (key[0], key[1].replace(hour=0), *key[2:])
        sums = days.get(day)
        if sums is None:
            days[day] = list(values)
        else:
            for index, value in enumerate(values):
                sums[index] += value
    return days


def hour_of(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)


def stored(session: Session, table: Table) -> Sums:
    """The table as it stands, in the form of `from_charges`."""
    rows = session.execute(select(*[table.c[name] for name in _COLUMNS]))
    return {tuple(row[: len(KEY) + 1]): list(row[len(KEY) + 1 :]) for row in rows}


def _add(session: Session, table: Table, sums: Sums) -> None:
    rows = [(*key, *values) for key, values in sums.items()]
    bulk.add_up(session, table, _COLUMNS, rows, KEY, SUMS)
