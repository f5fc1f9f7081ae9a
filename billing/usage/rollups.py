"""Roll-ups of charges and adjustments by hour, by day, and by day and tenant for operator pages.

They are updated as charges are posted and can be rebuilt from them. An adjustment counts in the hour
in which it is posted, as a kind of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import add, itemgetter
from typing import Any, Protocol

from sqlalchemy import Table, delete, func, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_accounts
from billing.accounts.tables import BillingAccount
from billing.columns import (
    AMOUNT_COLUMNS,
    PLAIN_SUMS,
    QUANTITY_COLUMNS,
)
from billing.pricing.pricing import Component
from billing.usage import retention
from billing.usage.border import border_of
from billing.usage.tables import (
    Adjustment,
    Charge,
    DailyTenantUsage,
    DailyUsage,
    HourlyUsage,
    UsageEventRow,
)
from core import bulk_insert

HOURLY: Table = HourlyUsage.__table__  # type: ignore[assignment]
DAILY: Table = DailyUsage.__table__  # type: ignore[assignment]
TENANT_DAILY: Table = DailyTenantUsage.__table__  # type: ignore[assignment]
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
TENANT_DAILY_KEY = ("at", "tenant_id", "model", "currency")
TENANT_DAILY_SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "amount")
_TENANT_DAILY_INDEXES = [SUMS.index(name) for name in TENANT_DAILY_SUMS]
_ADJUSTED = (
    *("tenant_id", "created_at", "project_id", "model", "usage_period_id", "bill_period_id"),
    *("currency", "component", "amount"),
)
_AMOUNT_OF = {
    component.value: len(QUANTITY_COLUMNS) + index for index, component in enumerate(Component)
}
_PLAIN_PLACES = tuple(SUMS.index(name) for name in PLAIN_SUMS)
_OTHER_PLACES = tuple(place for place in range(len(SUMS)) if place not in _PLAIN_PLACES)
ADJUSTMENT = "adjustment"
Sums = dict[tuple[Any, ...], list[int]]
_Groups = dict[tuple[Any, ...], list[Sequence[int]]]  # rows to be added up, by the key of their sum


class Event(Protocol):
    """The fields of a rated event by which its charge is summed."""

    @property
    def tenant_id(self) -> str: ...
    @property
    def project_id(self) -> str: ...
    @property
    def key_id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def occurred_at(self) -> datetime: ...


class Head(Protocol):
    @property
    def price_version(self) -> str: ...
    @property
    def currency(self) -> str: ...
    @property
    def usage_period_id(self) -> str: ...
    @property
    def bill_period_id(self) -> str: ...


class Rated(Protocol):
    """A charge; `sums` are those of PLAIN_SUMS or of SUMS."""

    @property
    def head(self) -> Head: ...
    @property
    def sums(self) -> tuple[int, ...]: ...
    @property
    def is_plain(self) -> bool: ...


def add_charges(session: Session, rated: Iterable[tuple[Event, Rated]]) -> None:
    """Add new charges to all roll-ups. Hold the tenants' locks."""
    plain: _Groups = {}
    whole: _Groups = {}
    for event, charge in rated:
        head = charge.head
        key = (
            event.tenant_id,
            hour_of(event.occurred_at),
            event.project_id,
            event.key_id,
            event.model,
            event.adapter or "",
            event.kind,
            head.price_version,
            head.usage_period_id,
            head.bill_period_id,
            head.currency,
        )
        groups = plain if charge.is_plain else whole
        groups.setdefault(key, []).append(charge.sums)
    found = {key: _widened(sums) for key, sums in _summed(plain).items()}
    for key, sums in _summed(whole).items():
        before = found.get(key)
        found[key] = sums if before is None else [*map(add, before, sums)]
    _add_all(session, found)


def _widened(sums: Sequence[int]) -> list[int]:
    """PLAIN_SUMS as SUMS, with zeros in the other columns."""
    found = [0] * len(SUMS)
    for place, value in zip(_PLAIN_PLACES, sums, strict=True):
        found[place] = value
    return found


def add_adjustments(session: Session, adjustments: Iterable[Mapping[str, Any]]) -> None:
    """Add newly inserted rows of `adjustments`. Hold the tenants' locks."""
    _add_all(session, _hours_of(adjustments))


def rebuild(session: Session) -> tuple[int, int]:
    """Rebuild the tables from charges and adjustments; returns the numbers of hourly and daily
    rows. If events were dropped or moved, rebuilding starts at the second kept day.
    """
    # Rating adds to these tables under the tenants' locks.
    lock_accounts(session, session.scalars(select(BillingAccount.tenant_id)).all())
    dropped, border = retention.latest_retention(session), border_of(session)
    start = dropped.kept_from + timedelta(days=1) if dropped else datetime.min.replace(tzinfo=UTC)
    start = max(start, border.whole_from) if border is not None else start
    hours = {key: sums for key, sums in recompute(session).items() if key[1] >= start}
    days = by_day(hours)
    for table in (HOURLY, DAILY, TENANT_DAILY):
        session.execute(delete(table).where(table.c.at >= start))
    _add_all(session, hours)
    return len(hours), len(days)


def recompute(session: Session) -> Sums:
    """Hourly sums, computed from charges and adjustments."""
    names = [Adjustment.__table__.c[name] for name in _ADJUSTED]
    rows = session.execute(select(*names).order_by(Adjustment.id)).mappings().all()
    return from_charges(session) | _hours_of([dict(row) for row in rows])


def from_charges(session: Session) -> Sums:
    """Hourly sums, computed from charges by the database."""
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


def _hours_of(adjustments: Iterable[Mapping[str, Any]]) -> Sums:
    found: Sums = {}
    for row in adjustments:
        key = (
            row["tenant_id"],
            hour_of(row["created_at"]),
            row["project_id"],
            "",
            row["model"],
            "",
            ADJUSTMENT,
            "",
            row["usage_period_id"],
            row["bill_period_id"],
            row["currency"],
        )
        sums = found.setdefault(key, [0] * len(SUMS))
        sums[_AMOUNT_OF[row["component"]]] += row["amount"]
        sums[-1] += row["amount"]
    return found


def by_day(hours: Sums) -> Sums:
    found: _Groups = {}
    for key, values in hours.items():
        day = (key[0], key[1].replace(hour=0), *key[2:])
        found.setdefault(day, []).append(values)
    return _summed(found)


def by_tenant_day(days: Sums) -> Sums:
    """TENANT_DAILY_SUMS by TENANT_DAILY_KEY."""
    found: _Groups = {}
    for key, values in days.items():
        tenant_id, at, model, currency = key[0], key[1], key[4], key[len(KEY)]
        sums = [values[place] for place in _TENANT_DAILY_INDEXES]
        found.setdefault((at, tenant_id, model, currency), []).append(sums)
    return _summed(found)


def _summed(groups: _Groups) -> Sums:
    return {key: [*map(sum, zip(*rows, strict=True))] for key, rows in groups.items()}


def hour_of(at: datetime) -> datetime:
    """The start of its hour of UTC."""
    return _start_of(int(at.timestamp()) // 3600)  # `replace` would take four times as long


@lru_cache(maxsize=4096)
def _start_of(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * 3600, UTC)


def stored(session: Session, table: Table) -> Sums:
    """The stored rows, in the form of `from_charges`."""
    rows = session.execute(select(*[table.c[name] for name in _COLUMNS]))
    return {tuple(row[: len(KEY) + 1]): list(row[len(KEY) + 1 :]) for row in rows}


def _add_all(session: Session, hours: Sums) -> None:
    days = by_day(hours)
    _add(session, HOURLY, hours)
    _add(session, DAILY, days)
    tenant_days = [(*key, *values) for key, values in by_tenant_day(days).items()]
    bulk_insert.upsert_sums(
        session,
        TENANT_DAILY,
        (*TENANT_DAILY_KEY, *TENANT_DAILY_SUMS),
        tenant_days,
        TENANT_DAILY_KEY,
        TENANT_DAILY_SUMS,
    )


def _add(session: Session, table: Table, sums: Sums) -> None:
    others_of, plain_of = itemgetter(*_OTHER_PLACES), itemgetter(*_PLAIN_PLACES)
    plain, whole = [], []
    for key, values in sums.items():
        if any(others_of(values)):
            whole.append((*key, *values))
        else:
            plain.append((*key, *plain_of(values)))
    head = (*KEY, "currency")
    bulk_insert.upsert_sums(session, table, (*head, *PLAIN_SUMS), plain, KEY, PLAIN_SUMS)
    bulk_insert.upsert_sums(session, table, _COLUMNS, whole, KEY, SUMS)
