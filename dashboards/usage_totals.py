"""Usage totals for the pages: the buckets are read once and aggregated for tiles, charts and tables.

Tiles, charts, table and CSV of a page come from one `UsageTotals`, so they always agree.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.origin_rollups import OTHERS
from billing.rollups import ADJUSTMENT
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage_buckets import BucketQuery, usage_buckets
from core.tenants.scope import TenantScope
from dashboards.charts import STYLES, Series
from dashboards.entity_names import names_of
from dashboards.filters import Range

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
    steps: dict[str, list[dict[str, int]]]  # group -> one entry per bucket
    names: dict[str, str] = field(default_factory=dict)  # group -> display name

    def total(self, column: str) -> int:
        return sum(sums[column] for sums in self.counts.values())

    def series(self, column: str) -> list[Series]:
        """The largest groups, and the rest as "Other", so that no colour repeats."""
        ranked = sorted(self.counts, key=lambda group: -self.counts[group][column])
        shown = ranked if len(ranked) <= STYLES else ranked[: STYLES - 1]
        rest = ranked[len(shown) :]
        series = [
            Series(self.name(group), [step[column] for step in self.steps[group]])
            for group in shown
        ]
        if rest:
            other = [
                sum(self.steps[group][i][column] for group in rest) for i in range(len(self.labels))
            ]
            series.append(Series("Other", other))
        return series

    def per_step(self, column: str) -> list[int]:
        return [
            sum(steps[index][column] for steps in self.steps.values())
            for index in range(len(self.labels))
        ]

    def name(self, group: str) -> str:
        if group == OTHERS:
            return "all others"
        return self.names.get(group) or group or _UNNAMED[self.group_by]


def by_region(found: UsageTotals, regions: Mapping[str, str]) -> UsageTotals:
    """Totals by engine as totals by the region of each engine."""
    merged = UsageTotals("region", found.labels, {}, {})
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
    limit = min(width.most, span.days * 86400 // width.seconds)
    query = BucketQuery(span.start, span.end, width, (), limit, kinds=(ADJUSTMENT,))
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
    limit = min(width.most, span.days * 86400 // width.seconds)
    if group_by == "end_user":
        filters = {"most_names": MOST_END_USERS, **filters}
    query = BucketQuery(span.start, span.end, width, (group_by,), limit, **filters)
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
    form = "%H:%M" if width.seconds < 86400 else "%d %b"
    labels = [bucket.start.strftime(form) for bucket in found]
    names = names_of(session, scope, counts) if group_by in _BY_ID else {}
    return UsageTotals(group_by, labels, dict(counts), dict(steps), names)
