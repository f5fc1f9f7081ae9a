"""Counts of requests that limits rejected or delayed, per tenant, hour and reason."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.tenants.models import RejectionRow
from core.tenants.scope import TenantScope

_SUMS = ("rejected", "queued", "queued_ms")


@dataclass(frozen=True, slots=True)
class RejectionCount:
    tenant_id: str
    at: datetime  # start of the hour
    reason: str  # a limit's name, or: money, overloaded, queue_full, queue_timeout, queue
    rejected: int
    queued: int
    queued_ms: int


def add(session: Session, counts: Iterable[RejectionCount]) -> None:
    rows = [
        {name: getattr(each, name) for name in ("tenant_id", "at", "reason", *_SUMS)}
        for each in sorted(counts, key=lambda each: (each.tenant_id, each.at, each.reason))
    ]
    if not rows:
        return
    postgres = session.get_bind().dialect.name == "postgresql"
    statement: Any = (postgresql.insert if postgres else sqlite.insert)(RejectionRow)
    table: Any = RejectionRow
    increments = {name: getattr(table, name) + getattr(statement.excluded, name) for name in _SUMS}
    upsert = statement.on_conflict_do_update(
        index_elements=["tenant_id", "at", "reason"], set_=increments
    )
    session.connection().execute(upsert, rows)


def since(session: Session, scope: TenantScope, moment: datetime) -> list[dict[str, Any]]:
    """Sums by reason, most rejected first. `mean` is the mean wait in ms."""
    table = RejectionRow
    sums = [func.sum(getattr(table, name)) for name in _SUMS]
    rows = session.execute(
        select(table.reason, *sums)
        .where(table.tenant_id == scope.tenant_id, table.at >= moment)
        .group_by(table.reason)
    )
    rows_by_reason = [
        {
            "reason": reason,
            "rejected": int(rejected),
            "queued": int(queued),
            "mean": int(queued_ms) // int(queued) if queued else 0,
        }
        for reason, rejected, queued, queued_ms in rows
    ]
    return sorted(rows_by_reason, key=lambda row: (-row["rejected"], -row["queued"]))
