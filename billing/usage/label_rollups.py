"""Hourly usage by set of labels. The batches that `service_rollups` sums are summed here too, in the same
transaction; usage without labels has no rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, literal, select
from sqlalchemy.orm import Session

from billing.usage import rollup_writes
from billing.usage.tables import Charge, HourlyLabelUsage, UsageBatch, UsageEventRow
from core import labels

TABLE: Any = HourlyLabelUsage
KEY = (
    *("tenant_id", "at", "project_id", "key_id", "model", "adapter", "kind", "price_version"),
    *("usage_period_id", "bill_period_id", "labels"),
)
_EVENT: Any = UsageEventRow


def add(session: Session, chosen: ColumnElement[bool], columns: Sequence[str]) -> None:
    """Add the chosen events that have labels, and their charges, whose other columns are zero."""
    group = [
        _EVENT.tenant_id,
        rollup_writes.start_of("hour", session),
        *(_EVENT.project_id, _EVENT.key_id, _EVENT.model),
        func.coalesce(_EVENT.adapter, literal("")),
        *(_EVENT.kind, _EVENT.price_version, Charge.usage_period_id, Charge.bill_period_id),
        *(_EVENT.labels, Charge.currency),
    ]
    rows = (
        select(*group, *(func.sum(getattr(Charge, each)) for each in columns))
        .join(Charge, Charge.request_id == _EVENT.request_id)
        .where(chosen, _EVENT.labels.is_not(None))
        .group_by(*group)
        .order_by(*group)  # always in the same order, to avoid deadlocks
    )
    rollup_writes.add_from(session, TABLE, KEY, ("currency",), columns, rows)


def spent(
    session: Session,
    label: str,
    owner: Mapping[str, str],
    start: datetime | None,
    end: datetime | None,
) -> int:
    """Picounits of the rated usage with this label, such as `team=search`; `owner` has the tenant and
    the currency. Usage that is rated and not summed yet is read from its events; as are the parts of
    an hour in which `start` or `end` is, of days that are still here."""
    found = 0
    inner = None if start is None else _hour_after(start)
    last = None if end is None else end.replace(minute=0, second=0, microsecond=0)
    rolled = [TABLE.tenant_id == owner["tenant_id"], TABLE.currency == owner["currency"]]
    rolled += [TABLE.at >= inner] if inner is not None else []
    rolled += [TABLE.at < last] if last is not None else []
    found += _having(
        session.execute(
            select(TABLE.labels, func.sum(TABLE.amount)).where(*rolled).group_by(TABLE.labels)
        ),
        label,
    )
    waiting = select(UsageBatch.id).where(
        UsageBatch.rated_at.is_not(None), UsageBatch.summed_at.is_(None)
    )
    inside = [_EVENT.occurred_at >= start] if start is not None else []
    inside += [_EVENT.occurred_at < end] if end is not None else []
    found += _of_events(session, label, owner, [*inside, _EVENT.batch_id.in_(waiting)])
    summed = _EVENT.batch_id.not_in(waiting)
    for low, high in ((start, inner), (last, end)):
        if low is not None and high is not None and low < high:
            partly = [_EVENT.occurred_at >= low, _EVENT.occurred_at < high, summed]
            found += _of_events(session, label, owner, partly)
    return found


def _of_events(
    session: Session,
    label: str,
    owner: Mapping[str, str],
    where: Iterable[ColumnElement[bool]],
) -> int:
    rows = session.execute(
        select(_EVENT.labels, func.sum(Charge.amount))
        .join(Charge, Charge.request_id == _EVENT.request_id)
        .where(
            _EVENT.tenant_id == owner["tenant_id"],
            _EVENT.labels.is_not(None),
            Charge.currency == owner["currency"],
            *where,
        )
        .group_by(_EVENT.labels)
    )
    return _having(rows, label)


def _having(rows: Iterable[Any], label: str) -> int:
    return sum(int(units) for text, units in rows if labels.has(text, label))


def _hour_after(at: datetime) -> datetime:
    """The first whole hour from `at` on."""
    hour = at.replace(minute=0, second=0, microsecond=0)
    return hour if hour == at else datetime.fromtimestamp(hour.timestamp() + 3600, at.tzinfo)
