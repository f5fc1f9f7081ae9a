"""What a tenant saved by prefix caching, and which part of it prompt order made possible."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.usage.day_range import Range
from billing.usage.tables import DailyService, HourlyService
from core.tenants.scope import TenantScope


@dataclass(frozen=True, slots=True)
class Savings:
    """Picounits. `ordering` is a part of `caching`."""

    caching: int = 0
    ordering: int = 0
    reordered_tokens: int = 0  # cached tokens gained by prompt order


def read(session: Session, scope: TenantScope, span: Range) -> Savings:
    """Per price version: cached tokens at the average price of computed ones, minus their charge.

    Exact for a flat price. A version without computed tokens counts as 0.
    """
    table: Any = DailyService if span.zone == "UTC" else HourlyService
    query = (
        select(
            func.sum(table.input_tokens - table.cached_tokens),
            func.sum(table.cached_tokens),
            func.sum(table.input_amount),
            func.sum(table.cached_amount),
            func.sum(table.reordered_cached_tokens),
        )
        .where(
            table.tenant_id == scope.tenant_id,
            table.at >= span.start,
            table.at < span.end,
        )
        .group_by(table.price_version)
    )
    if scope.project_id is not None:
        query = query.where(table.project_id == scope.project_id)
    caching = ordering = tokens = 0
    for row in session.execute(query):
        computed, cached, computed_cost, cached_cost, reordered = (int(value or 0) for value in row)
        tokens += reordered
        if not computed or not cached:
            continue
        saved = max(0, cached * computed_cost // computed - cached_cost)
        caching += saved
        ordering += saved * min(reordered, cached) // cached
    return Savings(caching, ordering, tokens)
