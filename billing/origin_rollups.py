"""Daily usage by engine and by end user, for the pages and the finance API.

The batches that `service_rollups` sums are summed here too, in the same transaction. A row is one
project's day of one engine or one end user, so there are at most as many as events, and far fewer where
an end user asks more than once a day. Names of end users leave with an erasure, and with the events that
retention drops.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, literal, select
from sqlalchemy.orm import Session

from billing import rollup_writes
from billing.models import Charge, DailyEndUserUsage, DailyEngineUsage, UsageBatch, UsageEventRow
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from core.tenants.scope import TenantScope

SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
TABLES: dict[str, Any] = {"engine_id": DailyEngineUsage, "end_user": DailyEndUserUsage}
OTHERS = "\x1f others"  # in place of all names but the largest; no client sends a control character
_EVENT: Any = UsageEventRow


def add(session: Session, chosen: ColumnElement[bool]) -> None:
    """Add the chosen events and their charges."""
    for name, table in TABLES.items():
        key = ("tenant_id", "at", "project_id", name)
        group = [
            _EVENT.tenant_id,
            rollup_writes.start_of("day", session),
            _EVENT.project_id,
            func.coalesce(getattr(_EVENT, name), literal("")),
        ]
        rows = (
            select(*group, *(func.sum(getattr(Charge, each)) for each in SUMS))
            .join(Charge, Charge.request_id == _EVENT.request_id)
            .where(chosen)
            .group_by(*group)
            .order_by(*group)  # always in the same order, to avoid deadlocks
        )
        rollup_writes.add_from(session, table, key, (), SUMS, rows)


def forget(session: Session, scope: TenantScope, end_user: str) -> None:
    """Move the name's sums to those of no name. Summing of batches that hold it has ended, or starts
    when this transaction has."""
    named = (_EVENT.tenant_id == scope.tenant_id, _EVENT.end_user == end_user)
    batches = select(_EVENT.batch_id).where(*named)
    session.execute(select(UsageBatch.id).where(UsageBatch.id.in_(batches)).with_for_update()).all()
    table: Any = DailyEndUserUsage
    own = (table.tenant_id == scope.tenant_id, table.end_user == end_user)
    columns = (table.tenant_id, table.at, table.project_id)
    rows = select(*columns, literal(""), *(getattr(table, each) for each in SUMS)).where(*own)
    key = ("tenant_id", "at", "project_id", "end_user")
    rollup_writes.add_from(session, table, key, (), SUMS, rows)
    session.execute(delete(table).where(*own))


def drop_names_before(session: Session, kept_from: datetime) -> None:
    """With the events, so that no name is kept for longer than the requests that gave it."""
    session.execute(delete(DailyEndUserUsage).where(DailyEndUserUsage.at < kept_from))


def largest(
    session: Session, scope: TenantScope, name: str, span: tuple[datetime, datetime], most: int
) -> ColumnElement[Any]:
    """The column of names, in which all but the `most` with the most input tokens are OTHERS."""
    table = TABLES[name]
    inside = [table.tenant_id == scope.tenant_id, table.at >= span[0], table.at < span[1]]
    if scope.project_id:
        inside.append(table.project_id == scope.project_id)
    column = getattr(table, name)
    ranked = (
        select(column)
        .where(*inside)
        .group_by(column)
        .order_by(func.sum(table.input_tokens).desc(), column)
        .limit(most)
    )
    kept = list(session.scalars(ranked))
    if len(kept) < most:
        chosen: ColumnElement[Any] = column.expression
        return chosen
    return case((column.in_(kept), column), else_=literal(OTHERS))
