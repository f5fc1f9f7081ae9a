"""Service levels of a tenant in a date range: outcomes, percentiles of first token and speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.usage.service_rollups import percentile
from billing.usage.tables import (
    FIRST_COLUMNS,
    FIRST_TOKEN_MS,
    SPEED_COLUMNS,
    TOKENS_A_SECOND,
    DailyService,
    HourlyService,
)
from billing.usage.usage_buckets import Width
from core.tenants.scope import TenantScope

_COUNTS = ("answers", "refused", "failed", "queue_ms")
_ALL = (*_COUNTS, *FIRST_COLUMNS, *SPEED_COLUMNS)


@dataclass(slots=True)
class ServiceTotals:
    """Sums of one group."""

    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ALL, 0))

    def add(self, values: Any) -> None:
        for name in _ALL:
            self.sums[name] += int(values[name] or 0)

    def first_token_ms(self, share: float) -> float | None:
        return percentile([self.sums[name] for name in FIRST_COLUMNS], FIRST_TOKEN_MS, share)

    def speed(self, share: float) -> float | None:
        """Tokens per second after the first token. 95 % of responses are faster than `speed(0.95)`."""
        counts = [self.sums[name] for name in SPEED_COLUMNS]
        return percentile(counts, TOKENS_A_SECOND, 1 - share)


def read(
    session: Session,
    scope: TenantScope,
    start: datetime,
    end: datetime,
    width: Width,
    group_by: str = "",
    *,
    filters: Mapping[str, Sequence[str]] | None = None,  # values by column
) -> tuple[ServiceTotals, dict[str, ServiceTotals]]:
    """Totals, and by group. `width` chooses the hourly or the daily table."""
    table: Any = HourlyService if width is Width.HOUR else DailyService
    column = getattr(table, group_by) if group_by else func.min(table.kind)
    sums = [func.sum(getattr(table, name)).label(name) for name in _ALL]
    query = select(column.label("name"), *sums).where(
        table.tenant_id == scope.tenant_id, table.at >= start, table.at < end
    )
    for name, values in (filters or {}).items():
        query = query.where(getattr(table, name).in_(values))
    if scope.project_id is not None:
        query = query.where(table.project_id == scope.project_id)
    if group_by:
        query = query.group_by(column)
    everything, groups = ServiceTotals(), {}
    for row in session.execute(query).mappings():
        if row["answers"] is None:
            continue
        groups[row["name"] or ""] = one = ServiceTotals()
        one.add(row)
        everything.add(row)
    return everything, groups
