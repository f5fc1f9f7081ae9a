"""Usage and costs in time buckets, for the finance API, the pages and the exports.

Days and hours come from the roll-ups; so do days by end user or engine alone. Minutes, and every other
query that filters or groups by what only events know (batch, `conditions`), come from the events.
Every query takes a TenantScope. Buckets are in UTC and aligned to their width; days may be those of
another time zone. They come from the hours, and where local midnight is inside an hour, from its events.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, literal, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.columns import AMOUNT_COLUMNS, PART_QUANTITIES, QUANTITY_COLUMNS
from billing.usage import local_days, origin_rollups
from billing.usage.border import not_moved
from billing.usage.raw_rows import Grouping, Wanted
from billing.usage.reading import read_buckets
from billing.usage.rollups import ADJUSTMENT
from billing.usage.tables import (
    Charge,
    DailyService,
    DailyUsage,
    HourlyService,
    HourlyUsage,
    UsageEventRow,
)
from core.database import epoch_bucket
from core.errors import BadRequest
from core.events import UsageKind
from core.tenants.scope import TenantScope


class Width(Enum):
    """Bucket widths: label, seconds, default and maximum number of buckets per page."""

    MINUTE = ("1m", 60, 60, 1440)
    HOUR = ("1h", 3600, 24, 168)
    DAY = ("1d", 86400, 7, 180)

    def __init__(self, label: str, seconds: int, usual: int, most: int) -> None:
        self.label = label
        self.seconds = seconds
        self.usual = usual
        self.most = most


_ALMOST = timedelta(hours=1) - timedelta(microseconds=1)  # to the next whole hour
DIMENSIONS = (
    "project_id",
    "key_id",
    "model",
    "adapter",
    "kind",
    "member_id",
    "currency",
    "batch",
    "end_user",
    "engine_id",
    "labels",
)


@dataclass(frozen=True, slots=True)
class BucketQuery:
    start: datetime
    end: datetime
    width: Width
    group_by: tuple[str, ...] = ()  # of DIMENSIONS
    limit: int | None = None  # buckets per page
    project_ids: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    member_ids: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # "" is none
    zone: str = "UTC"  # of days, an IANA name
    batch: bool | None = None  # True: only batch requests; False: only others
    conditions: tuple[ColumnElement[bool], ...] = ()  # on usage events and their charges
    # Whether charges are read with events. Without them, amounts and what rating counts are 0.
    charges: bool = True
    # Where the reason goes if the store of moved days does not answer, whose sums are then left out;
    # without it, that is an error.
    lacks: list[str] | None = None

    @property
    def needs_events(self) -> bool:
        grouped = {"batch", "end_user", "engine_id", "labels"} & set(self.group_by)
        return bool(grouped or self.conditions) or self.batch is not None

    @property
    def is_zoned(self) -> bool:
        return self.width is Width.DAY and self.zone != "UTC"

    @property
    def origin(self) -> str:
        """The dimension, if days by origin are asked for and nothing that their roll-ups lack; or ""."""
        filters = (self.key_ids, self.models, self.member_ids, self.kinds, self.adapters)
        known = self.width is Width.DAY and not any((*filters, self.conditions, self.is_zoned))
        single = len(self.group_by) == 1 and self.group_by[0] in origin_rollups.TABLES
        return self.group_by[0] if known and single and self.batch is None else ""


@dataclass(frozen=True, slots=True)
class BucketRow:
    """Sums of one group in one bucket. `counts` and `amounts` are keyed by column name."""

    group: dict[str, str | None]
    counts: dict[str, int]
    amounts: dict[str, int]  # picounits


@dataclass(frozen=True, slots=True)
class Bucket:
    start: datetime
    end: datetime
    rows: list[BucketRow]


@dataclass(frozen=True, slots=True)
class BucketPage:
    buckets: list[Bucket]
    next_start: datetime | None  # where the next page begins


def usage_buckets(session: Session, scope: TenantScope, query: BucketQuery) -> BucketPage:
    """Every bucket from start to end, including empty ones. Raises BadRequest with the field."""
    _check(query)
    limit = query.limit or query.width.usual
    if query.is_zoned:
        return _local_days(session, scope, query, limit)
    step = timedelta(seconds=query.width.seconds)
    start = floor_to(query.start, query.width)
    end = min(query.end, start + limit * step)
    found: dict[datetime, list[BucketRow]] = {}
    if query.origin and origin_rollups.known_since(session, start):
        rows = session.execute(_by_origin(scope, query, start, end)).mappings()
        read = [dict(row) for row in rows]
    elif query.width is Width.MINUTE or query.needs_events:
        statement = _select(session, scope, query, start, end)
        read = _raw(session, scope, query, (start, end), statement)
    else:
        statement = _select(session, scope, query, start, end)
        read = [dict(row) for row in session.execute(statement).mappings()]
    for values in read:
        found.setdefault(_moment(values["bucket"]), []).append(_row(query, values))
    buckets = []
    moment = start
    while moment < end:
        buckets.append(Bucket(moment, moment + step, found.get(moment, [])))
        moment += step
    return BucketPage(buckets, moment if moment < query.end else None)


def _row(query: BucketQuery, values: Mapping[str, Any]) -> BucketRow:
    return BucketRow(
        {name: values[name] for name in query.group_by},
        {name: int(values[name] or 0) for name in QUANTITY_COLUMNS},
        {name: int(values[name] or 0) for name in AMOUNT_COLUMNS},
    )


def _local_days(session: Session, scope: TenantScope, query: BucketQuery, limit: int) -> BucketPage:
    """Days of another zone. An hour with a local midnight inside counts to the day in which it begins,
    less what its events after midnight have, which is added to the day after."""
    bounds = local_days.midnights(query.start, query.end, query.zone, limit)
    days = _DaySums(query, bounds)
    if query.needs_events:
        for values in _quarters(session, scope, query, (bounds[0], bounds[-1])):
            days.add(_moment(values["bucket"]), values)
    else:
        first, last = (local_days.hour_of(each + _ALMOST) for each in (bounds[0], bounds[-1]))
        hourly = replace(query, width=Width.HOUR)
        statement = _select(session, scope, hourly, first, last)
        for row in session.execute(statement).mappings():
            days.add(_moment(row["bucket"]), dict(row))
        for bound in bounds:
            hour = local_days.hour_of(bound)
            if hour == bound:
                continue
            for values in _after(session, scope, hourly, bound, hour):
                days.move(bound, values)
    buckets = [Bucket(*each, days.rows(each[0])) for each in pairwise(bounds)]
    return BucketPage(buckets, bounds[-1] if bounds[-1] < query.end else None)


def _after(
    session: Session, scope: TenantScope, hourly: BucketQuery, bound: datetime, hour: datetime
) -> list[dict[str, Any]]:
    """What the roll-ups of an hour have from a midnight inside it on. They tell billing periods apart,
    of which one may begin there; else it is read from the events that are rated."""
    period = session.scalar(
        select(BillingPeriod.id).where(
            BillingPeriod.tenant_id == scope.tenant_id, BillingPeriod.starts_at == bound
        )
    )
    after = hour + local_days.HOUR
    if period is not None and not _by_member(hourly):
        table = HourlyUsage
        posted = case((table.kind == ADJUSTMENT, table.bill_period_id), else_=table.usage_period_id)
        statement = _select(session, scope, hourly, hour, after).where(posted == period)
        return [dict(row) for row in session.execute(statement).mappings()]
    span, seconds = (bound, after), local_days.QUARTER_S
    query = replace(hourly, charges=True)
    statement = _from_events(session, scope, query, *span, seconds)
    statement = statement.where(Charge.request_id.is_not(None))
    return _raw(session, scope, query, span, statement, seconds)


def _by_member(query: BucketQuery) -> bool:
    return bool(query.member_ids) or "member_id" in query.group_by


def _quarters(
    session: Session, scope: TenantScope, query: BucketQuery, span: tuple[datetime, datetime]
) -> list[dict[str, Any]]:
    """Sums of raw rows by quarters of an hour."""
    seconds = local_days.QUARTER_S
    statement = _from_events(session, scope, query, *span, seconds)
    return _raw(session, scope, query, span, statement, seconds)


class _DaySums:
    """Sums by day and group."""

    def __init__(self, query: BucketQuery, bounds: list[datetime]) -> None:
        self._query, self._bounds = query, bounds
        self._sums: dict[datetime, dict[tuple[Any, ...], dict[str, Any]]] = {
            each: {} for each in bounds[:-1]
        }

    def add(self, at: datetime, values: Mapping[str, Any]) -> None:
        self._count(self._bounds[bisect_right(self._bounds, at) - 1], values, 1)

    def move(self, bound: datetime, values: Mapping[str, Any]) -> None:
        """From the day that ends at the bound to the one that begins there."""
        index = self._bounds.index(bound)
        if index:
            self._count(self._bounds[index - 1], values, -1)
        if index < len(self._bounds) - 1:
            self._count(bound, values, 1)

    def rows(self, day: datetime) -> list[BucketRow]:
        """Groups that have anything, in order."""
        groups = sorted(self._sums[day].items(), key=lambda each: [str(part) for part in each[0]])
        names = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
        return [_row(self._query, sums) for _, sums in groups if any(sums[name] for name in names)]

    def _count(self, day: datetime, values: Mapping[str, Any], sign: int) -> None:
        # An adapter or a member that is none is null in events and "" in the roll-ups.
        group = {
            name: (values[name] or "") if name in _NULLABLE else values[name]
            for name in self._query.group_by
        }
        own = self._sums[day].setdefault(tuple(group.values()), dict(group))
        for name in (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS):
            own[name] = own.get(name, 0) + sign * int(values[name] or 0)


def _raw(
    session: Session,
    scope: TenantScope,
    query: BucketQuery,
    span: tuple[datetime, datetime],
    statement: Select[Any],
    seconds: int | None = None,
) -> list[dict[str, Any]]:
    """Sums of raw rows: those of moved days from their store, the others from the database."""
    values = _values(scope, query)
    matching = tuple((name, tuple(some)) for name, some in values.items() if some)
    grouping = Grouping(
        seconds or query.width.seconds,
        query.group_by,
        matching,
        query.batch,
        query.conditions,
    )
    wanted = Wanted(*span, scope.tenant_id)
    border, theirs = read_buckets(session, wanted, grouping, query.lacks)
    rows = session.execute(statement.where(*not_moved(border))).mappings()
    ours = [dict(row) for row in rows]
    if not theirs:
        return ours
    keys, sums = ("bucket", *query.group_by), (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
    unread = () if query.charges else (*_CHARGED, *AMOUNT_COLUMNS)
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (*({**each, **dict.fromkeys(unread, 0)} for each in theirs), *ours):
        own = merged.setdefault(tuple(row[name] for name in keys), dict.fromkeys(sums, 0))
        own |= {name: row[name] for name in keys}
        own |= {name: own[name] + int(row[name] or 0) for name in sums}
    return [merged[key] for key in sorted(merged, key=lambda key: [str(part) for part in key])]


def floor_to(moment: datetime, width: Width) -> datetime:
    seconds = int(moment.timestamp())
    return datetime.fromtimestamp(seconds - seconds % width.seconds, UTC)


def _check(query: BucketQuery) -> None:
    if query.end <= query.start:
        raise BadRequest("end_time must be after start_time.", param="end_time")
    for name in query.group_by:
        if name not in DIMENSIONS:
            known = ", ".join(DIMENSIONS)
            raise BadRequest(f"group_by is {name!r}; it must be one of {known}.", param="group_by")
    if query.limit is not None and not 1 <= query.limit <= query.width.most:
        raise BadRequest(
            f"limit is {query.limit}; with {query.width.label} buckets it must be 1 to "
            f"{query.width.most}.",
            param="limit",
        )


def _select(
    session: Session, scope: TenantScope, query: BucketQuery, start: datetime, end: datetime
) -> Select[Any]:
    if query.width is Width.MINUTE or query.needs_events:
        return _from_events(session, scope, query, start, end)
    by_member = _by_member(query)
    daily = query.width is Width.DAY
    table: Any = DailyUsage if daily else HourlyUsage
    if by_member:
        table = DailyService if daily else HourlyService
    sums = [
        func.sum(getattr(table, name)).label(name) for name in (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
    ]
    return _grouped(table, table.at.expression, query, sums).where(
        table.tenant_id == scope.tenant_id,
        table.at >= start,
        table.at < end,
        *_filters(table, scope, query),
    )


def _by_origin(
    scope: TenantScope, query: BucketQuery, start: datetime, end: datetime
) -> Select[Any]:
    table = origin_rollups.TABLES[query.origin]
    column: ColumnElement[Any] = getattr(table, query.origin).expression
    if query.origin == "end_user":
        column = func.nullif(column, "")  # as events have it
    wanted = origin_rollups.SUMS if query.charges else ("requests", *COUNTED)
    sums = [
        (func.sum(getattr(table, each)) if each in wanted else literal(0)).label(each)
        for each in origin_rollups.SUMS
    ]
    projects = (scope.project_id,) if scope.project_id else query.project_ids
    found = (
        select(table.at.expression.label("bucket"), column.label(query.origin), *sums)
        .where(table.tenant_id == scope.tenant_id, table.at >= start, table.at < end)
        .group_by(table.at.expression, column)
        .order_by(table.at.expression, column)
    )
    return found.where(table.project_id.in_(projects)) if projects else found


def _from_events(
    session: Session,
    scope: TenantScope,
    query: BucketQuery,
    start: datetime,
    end: datetime,
    seconds: int | None = None,
) -> Select[Any]:
    table = UsageEventRow
    dialect = session.get_bind().dialect.name
    bucket = epoch_bucket(table.occurred_at, dialect, seconds or query.width.seconds)
    rated: list[Any] = [
        func.coalesce(func.sum(getattr(Charge, name)), 0) if query.charges else literal(0)
        for name in (*_CHARGED, *AMOUNT_COLUMNS)
    ]
    sums = [
        *(each.label(name) for each, name in zip(rated, (*_CHARGED, *AMOUNT_COLUMNS), strict=True)),
        *(func.sum(getattr(table, name)).label(name) for name in COUNTED),
        func.sum(_billable_requests()).label("requests"),
    ]
    found = _grouped(table, bucket, query, sums)
    if query.charges:
        found = found.join(Charge, Charge.request_id == table.request_id, isouter=True)
    return found.where(
        table.tenant_id == scope.tenant_id,
        table.occurred_at >= start,
        table.occurred_at < end,
        *_filters(table, scope, query),
    )


def _billable_requests() -> ColumnElement[int]:
    """As rating counts them: not those that failed at our end, and not other kinds of usage."""
    event = UsageEventRow
    others = event.kind.in_((UsageKind.GPU_SECONDS, UsageKind.MODERATION))
    return case((others | (event.status >= 500), 0), else_=event.quantity)


COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
_CHARGED = (
    *("adapter_requests", "gpu_seconds", "moderation_calls"),
    *("audio_seconds", "images", "characters", *PART_QUANTITIES),
)


def _grouped(
    table: Any, bucket: ColumnElement[Any], query: BucketQuery, sums: Sequence[Any]
) -> Select[Any]:
    dimensions = [_dimension(table, name) for name in query.group_by]
    return (
        select(
            bucket.label("bucket"),
            *(each.label(name) for each, name in zip(dimensions, query.group_by, strict=True)),
            *sums,
        )
        .select_from(table)
        .group_by(bucket, *dimensions)
        .order_by(bucket, *dimensions)
    )


def _dimension(table: Any, name: str) -> ColumnElement[Any]:
    if name == "currency" and table is UsageEventRow:
        column: ColumnElement[Any] = Charge.currency.expression
        return column
    if name == "batch":
        return UsageEventRow.batch_job.is_not(None)
    chosen: ColumnElement[Any] = getattr(table, name)
    return chosen


def _values(scope: TenantScope, query: BucketQuery) -> dict[str, tuple[str, ...]]:
    """The wanted values of each column; none are all."""
    return {
        "project_id": (scope.project_id,) if scope.project_id else query.project_ids,
        "key_id": query.key_ids,
        "model": query.models,
        "member_id": query.member_ids,
        "kind": query.kinds,
        "adapter": query.adapters,
    }


def _column(table: Any, name: str) -> ColumnElement[Any]:
    """Of an event, "" is none, as in the roll-ups."""
    column: ColumnElement[Any] = getattr(table, name)
    return func.coalesce(column, "") if table is UsageEventRow and name in _NULLABLE else column


_NULLABLE = ("adapter", "member_id")


def _filters(table: Any, scope: TenantScope, query: BucketQuery) -> list[ColumnElement[bool]]:
    wanted = _values(scope, query)
    found: list[ColumnElement[bool]] = [
        _column(table, name).in_(values) for name, values in wanted.items() if values
    ]
    found += query.conditions
    if query.batch is not None:
        job = UsageEventRow.batch_job
        found.append(job.is_not(None) if query.batch else job.is_(None))
    return found


def _moment(value: Any) -> datetime:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    return datetime.fromtimestamp(int(value), UTC)
