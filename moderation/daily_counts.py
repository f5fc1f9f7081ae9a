"""Daily counts of the decisions that acted, updated as decisions are stored, so that pages need not
scan them. Only new decisions are counted, so a decision that is delivered twice counts once.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Table, select
from sqlalchemy.orm import Session

from core import bulk_insert
from core.events import ModerationEvent
from core.tenants.scope import TenantScope
from moderation.models import DailyDecisions

_TABLE: Table = DailyDecisions.__table__  # type: ignore[assignment]
_KEY = ("tenant_id", "at", "project_id", "action", "categories")
_COLUMNS = (*_KEY, "decisions")
_MAX_CATEGORIES_LENGTH = 500  # characters of the column


def add(session: Session, events: Iterable[ModerationEvent]) -> None:
    """Count events that acted and were not stored before."""
    counted = Counter(
        (each.tenant_id, _day(each.at), each.project_id, each.action, _names(each))
        for each in events
    )
    rows = [(*key, number) for key, number in sorted(counted.items())]
    bulk_insert.upsert_sums(session, _TABLE, _COLUMNS, rows, _KEY, ("decisions",))


def counts_between(
    session: Session, scope: TenantScope, start: datetime, end: datetime
) -> Iterable[tuple[str, list[str], int]]:
    """(action, categories, decisions) per day from `start` until before `end`."""
    table = DailyDecisions
    query = select(table.action, table.categories, table.decisions).where(
        table.tenant_id == scope.tenant_id, table.at >= start, table.at < end
    )
    if scope.project_id is not None:
        query = query.where(table.project_id == scope.project_id)
    for action, names, number in session.execute(query):
        yield action, names.split(",") if names else [], int(number)


def _names(event: ModerationEvent) -> str:
    kept: list[Any] = []
    for name in sorted(set(event.categories)):
        if len(",".join([*kept, name])) <= _MAX_CATEGORIES_LENGTH:
            kept.append(name)
    return ",".join(kept)


def _day(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
