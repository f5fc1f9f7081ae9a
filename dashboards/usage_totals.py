"""Usage totals for the pages: the buckets are read once and aggregated for tiles, charts and tables.

Tiles, charts, table and CSV of a page come from one `UsageTotals`, so they always agree.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.periods import zone_of
from billing.usage import origin_rollups
from billing.usage.day_range import Range
from billing.usage.origin_rollups import OTHERS, known_since
from billing.usage.rollups import ADJUSTMENT
from billing.usage.usage_buckets import COUNTED, BucketQuery, usage_buckets
from core.tenants.scope import TenantScope
from dashboards.charts import STYLES, Series
from dashboards.entity_names import names_of

GROUPS = {
    "model": "Model",
    "adapter": "Adapter",
    "key_id": "Key",
    "project_id": "Project",
    "member_id": "Member",
}
MOST_END_USERS = 100  # of days by end user; the rest are one row
_BY_ID = ("key_id", "project_id", "member_id")
ALL_GROUPS = {**GROUPS, "end_user": "End user", "engine_id": "Engine", "region": "Region"}


# Corrections of past usage have at most a project and a model.
_UNNAMED = {
    "model": "corrections",
    "adapter": "no adapter",
    "key_id": "corrections",
    "project_id": "corrections",
    "member_id": "no member",
    "end_user": "no end user",
    "engine_id": "no engine",
    "region": "no region",
}


@dataclass(slots=True)
class UsageTotals:
    group_by: str
    labels: list[str]  # one per bucket
    counts: dict[str, dict[str, int]]  # group -> column -> sum over the range
    steps: dict[
        str, list[dict[str, int]]
    ]  # group -> one entry per bucket; of groups that are drawn
    whole: list[dict[str, int]]  # the sums of all groups, one entry per bucket
    names: dict[str, str] = field(default_factory=dict)  # group -> display name

    def total(self, column: str) -> int:
        return sum(sums[column] for sums in self.counts.values())

    def series(self, column: str) -> list[Series]:
        """The largest groups, and the rest as "Other", so that no colour repeats."""
        ranked = sorted(self.steps, key=lambda group: -self.counts[group][column])
        shown = ranked if len(self.counts) <= STYLES else ranked[: STYLES - 1]
        series = [
            Series(self.name(group), [step[column] for step in self.steps[group]])
            for group in shown
        ]
        if len(shown) < len(self.counts):
            told = [sum(values) for values in zip(*(each.values for each in series), strict=True)]
            rest = zip(self.per_step(column), told, strict=True)
            series.append(Series("Other", [whole - own for whole, own in rest]))
        return series

    def per_step(self, column: str) -> list[int]:
        return [step[column] for step in self.whole]

    def name(self, group: str) -> str:
        if group == OTHERS:
            return "all others"
        return self.names.get(group) or group or _UNNAMED[self.group_by]


def by_region(found: UsageTotals, regions: Mapping[str, str]) -> UsageTotals:
    """Totals by engine as totals by the region of each engine."""
    merged = UsageTotals("region", found.labels, {}, {}, found.whole)
    for engine, sums in found.counts.items():
        name = regions.get(engine, "")
        steps = found.steps[engine]
        if name not in merged.counts:
            merged.counts[name] = dict.fromkeys(sums, 0)
            merged.steps[name] = [dict.fromkeys(step, 0) for step in steps]
        for target, given in (
            (merged.counts[name], sums),
            *zip(merged.steps[name], steps, strict=True),
        ):
            for column, value in given.items():
                target[column] += value
    return merged


def corrections(session: Session, scope: TenantScope, span: Range) -> int:
    """Picounits of corrections of past usage that were posted in the range."""
    width = span.width
    limit = min(width.most, span.buckets)
    query = BucketQuery(span.start, span.end, width, (), limit, kinds=(ADJUSTMENT,), zone=span.zone)
    buckets = usage_buckets(session, scope, query).buckets
    return sum(row.amounts["amount"] for bucket in buckets for row in bucket.rows)


def read(
    session: Session,
    scope: TenantScope,
    span: Range,
    now: datetime,
    group_by: str,
    **filters: Any,  # filters of BucketQuery: tuples of names
) -> UsageTotals:
    width = span.width
    limit = min(width.most, span.buckets)
    query = BucketQuery(span.start, span.end, width, (group_by,), limit, zone=span.zone, **filters)
    if query.origin == "end_user" and not query.charges and known_since(session, span.start):
        return _largest_end_users(session, scope, span, query)
    page = usage_buckets(session, scope, query)
    found = list(page.buckets)
    if group_by == "member_id" and not scope.project_id and not filters:
        # Corrections have no member. They are added, so that all groupings have the same totals.
        other = replace(query, group_by=(), kinds=(ADJUSTMENT,))
        for own, changed in zip(found, usage_buckets(session, scope, other).buckets, strict=True):
            own.rows.extend(replace(row, group={"member_id": ""}) for row in changed.rows)
    zero = dict.fromkeys((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS), 0)
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict(zero))
    steps: dict[str, list[dict[str, int]]] = defaultdict(lambda: [dict(zero) for _ in found])
    for index, bucket in enumerate(found):
        for row in bucket.rows:
            group = row.group[group_by] or ""
            for column, value in (*row.counts.items(), *row.amounts.items()):
                counts[group][column] += value
                steps[group][index][column] += value
    whole = [dict(zero) for _ in found]
    for each in steps.values():
        for step, sums in zip(whole, each, strict=True):
            for column, value in sums.items():
                step[column] += value
    form = "%H:%M" if width.seconds < 86400 else "%d %b"
    zone = zone_of(span.zone)
    labels = [bucket.start.astimezone(zone).strftime(form) for bucket in found]
    names = names_of(session, scope, counts) if group_by in _BY_ID else {}
    return UsageTotals(group_by, labels, dict(counts), dict(steps), whole, names)


def _largest_end_users(
    session: Session, scope: TenantScope, span: Range, query: BucketQuery
) -> UsageTotals:
    """A tenant may have millions of end users: a hundred are distinguished, and few of them drawn."""
    columns = ("requests", *COUNTED)
    found = origin_rollups.largest_end_users(
        session,
        scope,
        (span.start, span.end),
        columns,
        most=MOST_END_USERS,
        drawn=STYLES,
        projects=query.project_ids,
    )
    zero = dict.fromkeys((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS), 0)
    days = [span.start + timedelta(days=number) for number in range(span.days)]
    counts = {name: zero | sums for name, sums in found.by_name.items()}
    steps = {
        name: [zero | by_day.get(day, {}) for day in days] for name, by_day in found.drawn.items()
    }
    whole = [zero | found.by_day.get(day, {}) for day in days]
    return UsageTotals("end_user", [f"{day:%d %b}" for day in days], counts, steps, whole)
