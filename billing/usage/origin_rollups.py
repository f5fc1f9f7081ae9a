"""Daily usage by engine and by end user, for the pages and the finance API.

The batches that `service_rollups` sums are summed here too, in the same transaction. A row is one
project's day of one engine or one end user, so there are at most as many as events, and far fewer where
an end user asks more than once a day. Names of end users leave with an erasure, and with the events that
retention drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, delete, func, literal, select
from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage import retention, rollup_writes
from billing.usage.tables import (
    Charge,
    DailyEndUserUsage,
    DailyEngineUsage,
    UsageBatch,
    UsageEventRow,
)
from core.tenants.scope import TenantScope

SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
TABLES: dict[str, Any] = {"engine_id": DailyEngineUsage, "end_user": DailyEndUserUsage}
OTHERS = "\x1f others"  # in place of all names but the largest; no client sends a control character
_EVENT: Any = UsageEventRow


def add(session: Session, chosen: ColumnElement[bool], columns: Sequence[str]) -> None:
    """Add the chosen events and their charges, whose other columns are zero."""
    for name, table in TABLES.items():
        key = ("tenant_id", "at", "project_id", name)
        group = [
            _EVENT.tenant_id,
            rollup_writes.start_of("day", session),
            _EVENT.project_id,
            func.coalesce(getattr(_EVENT, name), literal("")),
        ]
        rows = (
            select(*group, *(func.sum(getattr(Charge, each)) for each in columns))
            .join(Charge, Charge.request_id == _EVENT.request_id)
            .where(chosen)
            .group_by(*group)
            .order_by(*group)  # always in the same order, to avoid deadlocks
        )
        rollup_writes.add_from(session, table, key, (), columns, rows)


def forget(session: Session, scope: TenantScope, end_user: str | None) -> None:
    """Move the sums of the name, or of all names for None, to those of no name. Summing of batches that
    hold it has ended, or starts when this transaction has."""
    every = end_user is None
    is_named = _EVENT.end_user.is_not(None) if every else _EVENT.end_user == end_user
    named = (_EVENT.tenant_id == scope.tenant_id, is_named)
    batches = select(_EVENT.batch_id).where(*named)
    session.execute(select(UsageBatch.id).where(UsageBatch.id.in_(batches)).with_for_update()).all()
    table: Any = DailyEndUserUsage
    is_own = table.end_user != "" if every else table.end_user == end_user
    own = (table.tenant_id == scope.tenant_id, is_own)
    columns = (table.tenant_id, table.at, table.project_id)
    sums = [func.sum(getattr(table, each)) for each in SUMS]
    rows = select(*columns, literal(""), *sums).where(*own).group_by(*columns)
    key = ("tenant_id", "at", "project_id", "end_user")
    rollup_writes.add_from(session, table, key, (), SUMS, rows)
    session.execute(delete(table).where(*own))


def drop_names_before(session: Session, kept_from: datetime) -> None:
    """With the events, so that no name is kept for longer than the requests that gave it."""
    session.execute(delete(DailyEndUserUsage).where(DailyEndUserUsage.at < kept_from))


Sums = dict[str, int]  # by column


@dataclass(frozen=True, slots=True)
class Largest:
    """Sums by name of the names with the most input tokens, largest first, then of OTHERS if there are
    more; sums by day of all names; and by day of the few names that are drawn."""

    by_name: dict[str, Sums]
    by_day: dict[datetime, Sums]
    drawn: dict[str, dict[datetime, Sums]]


def known_since(session: Session, start: datetime) -> bool:
    """End users' days are dropped with their events, which an archive may still have."""
    dropped = retention.latest_retention(session)
    return dropped is None or start >= dropped.kept_from


def largest_end_users(
    session: Session,
    scope: TenantScope,
    span: tuple[datetime, datetime],
    columns: tuple[str, ...],
    *,
    most: int,
    drawn: int,
    projects: tuple[str, ...] = (),
) -> Largest:
    """The sums of these columns, of which input_tokens is one, in `span`, which is of whole days. `most`
    names are distinguished; of those with the most requests `drawn` are summed by day."""
    inside = partial(_inside, (scope.project_id,) if scope.project_id else projects, scope, span)
    table: Any = DailyEndUserUsage
    sums = [func.sum(getattr(table, each)).label(each) for each in columns]
    ranked = (
        select(table.end_user, *sums)
        .where(*inside(table))
        .group_by(table.end_user)
        .order_by(func.sum(table.input_tokens).desc(), table.end_user)
        .limit(most + 1)
    )
    rows = session.execute(ranked).all()
    by_name = {row[0]: _whole(columns, row[1:]) for row in rows[:most]}
    by_day = _days(session, DailyEngineUsage, inside(DailyEngineUsage), columns)
    if len(rows) > most:
        by_name[OTHERS] = {
            each: sum(day[each] for day in by_day.values())
            - sum(name[each] for name in by_name.values())
            for each in columns
        }
    chosen = sorted(by_name.keys() - {OTHERS}, key=lambda name: -by_name[name]["requests"])[:drawn]
    # Named days let PostgreSQL look each up in the index, in place of reading the span again.
    own = [*inside(table), table.at.in_(list(by_day)), table.end_user.in_(chosen)]
    found: dict[str, dict[datetime, Sums]] = {name: {} for name in chosen}
    keys = (table.end_user, table.at)
    for name, at, *values in session.execute(select(*keys, *sums).where(*own).group_by(*keys)):
        found[name][at] = _whole(columns, values)
    return Largest(by_name, by_day, found)


def _inside(
    projects: tuple[str, ...], scope: TenantScope, span: tuple[datetime, datetime], table: Any
) -> list[ColumnElement[bool]]:
    found = [table.tenant_id == scope.tenant_id, table.at >= span[0], table.at < span[1]]
    return [*found, table.project_id.in_(projects)] if projects else found


def _days(
    session: Session, table: Any, where: list[ColumnElement[bool]], columns: tuple[str, ...]
) -> dict[datetime, Sums]:
    """Every roll-up has the same sums of a day; that of engines has the fewest rows."""
    sums = (func.sum(getattr(table, each)) for each in columns)
    rows = session.execute(select(table.at, *sums).where(*where).group_by(table.at))
    return {at: _whole(columns, values) for at, *values in rows}


def _whole(columns: tuple[str, ...], values: Sequence[Any]) -> Sums:
    return {name: int(value) for name, value in zip(columns, values, strict=True)}
