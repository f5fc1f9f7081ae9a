"""A period compared with the one before it: the link that asks for it, and how both are read."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session
from starlette.requests import Request

from billing.usage.day_range import Range
from billing.usage.usage_buckets import Width
from core.errors import BadRequest
from core.tenants.scope import TenantScope
from dashboards import request_log, service_totals, usage_totals
from dashboards.explorer import Link, address, before
from dashboards.query_filters import Filters

_EVENT_DAYS = 7  # so that a page reads a bounded number of events
_COLUMNS = {
    "model": "models",
    "adapter": "adapters",
    "key_id": "key_ids",
    "project_id": "project_ids",
    "member_id": "member_ids",
}


def wanted(request: Request) -> bool:
    return request.query_params.get("compare") == "1"


def link(request: Request) -> Link:
    """Turns the comparison on, or off again."""
    on = wanted(request)
    return Link("Compare with the period before", address(request, compare="" if on else "1"), on)


def usage_filters(filters: Filters, group_by: str, span: Range) -> dict[str, Any]:
    """Filters of BucketQuery. What the roll-ups do not know is read from the events: days by end user,
    engine and region are rolled up only by themselves. BadRequest for too many days of events."""
    if filters.rolled_up is not None and group_by in usage_totals.GROUPS:
        return {_COLUMNS[name]: values for name, values in filters.rolled_up.items()}
    by_origin = group_by in usage_totals.ALL_GROUPS and not filters.events
    if by_origin and span.width is Width.DAY:
        return {"charges": False}
    if span.days > _EVENT_DAYS:
        raise BadRequest(
            f"This query or grouping reads single requests, and the range has {span.days} days.",
            next_step=f"Add since:{_EVENT_DAYS}d, or use model, adapter, key, project and member only.",
            param="q",
        )
    return {"conditions": filters.events}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Requests of a period that a query finds, whatever their status."""

    requests: int
    refused: int  # status 400 to 499
    failed: int  # status 500 or above
    usage: usage_totals.UsageTotals


def outcomes(
    session: Session, scope: TenantScope, filters: Filters, span: Range, now: datetime
) -> tuple[Outcomes, Outcomes]:
    """Of the period, and of the one before. BadRequest as for `usage_filters`."""
    read_by = usage_filters(filters, "model", span)
    found, earlier = (
        Outcomes(
            *_counts(session, scope, filters, each),
            usage_totals.read(session, scope, each, now, "model", **read_by),
        )
        for each in (span, before(span))
    )
    return found, earlier


def _counts(
    session: Session, scope: TenantScope, filters: Filters, span: Range
) -> tuple[int, int, int]:
    if filters.rolled_up is not None:
        sums = service_totals.read(
            session, scope, span.start, span.end, span.width, filters=filters.rolled_up
        )[0].sums
        return sums["answers"], sums["refused"], sums["failed"]
    return request_log.counts(session, request_log.LogQuery(scope, span, filters.events))
