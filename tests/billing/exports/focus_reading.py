"""Reads FOCUS rows for tests, as dictionaries by column."""

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.exports.focus.documents import Window
from billing.exports.focus.rows import rows_of
from billing.exports.focus.tables import COST_AND_USAGE, choose
from billing.exports.subjects import Period
from core.tenants.scope import TenantScope


def focus_of(
    session: Session,
    scope: TenantScope | None,
    period: Period,
    version: str = "1.4",
    dataset: str = COST_AND_USAGE,
    now: datetime | None = None,
) -> list[dict[str, Any]]:
    table = choose(version, dataset)
    window = Window(period.start, period.end)
    rows = rows_of(session, table, scope, window, now)
    return [dict(zip(table.names, row, strict=True)) for row in rows]
