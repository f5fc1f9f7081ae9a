"""Costs by any two dimensions: end user, key, project, member, model, adapter and the labels."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.day_range import Range
from billing.usage.label_buckets import PREFIX, buckets_by_label
from billing.usage.usage_buckets import BucketQuery, Width
from core.tenants import organisations
from core.tenants.scope import TenantScope
from dashboards.entity_names import names_of
from dashboards.explorer import day_presets
from dashboards.filters import choice, date_range
from dashboards.formats import money
from dashboards.page_data import Input, PageData, Tile, show
from dashboards.pages.common import deps_of, viewer_of, wants_csv
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/costs/breakdown"
MOST_ROWS = 100
GROUPS = {
    "key_id": "Key",
    "project_id": "Project",
    "end_user": "End user",
    "model": "Model",
    "adapter": "Adapter",
    "member_id": "Member",
}
_NONE = {
    "key_id": "no key",
    "project_id": "no project",
    "end_user": "no end user",
    "model": "no model",
    "adapter": "no adapter",
    "member_id": "no member",
}
_BY_ID = ("key_id", "project_id", "member_id")
_SUMS = ("requests", "input_tokens", "output_tokens", "amount")
_Group = tuple[str, ...]


def dimensions(session: Session, scope: TenantScope) -> dict[str, str]:
    """Each with its title: those that every tenant has, and the labels of its projects."""
    own = {key for each in organisations.projects(session, scope) for key in each.label_keys}
    return GROUPS | {f"{PREFIX}{key}": f"Label {key}" for key in sorted(own)}


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "costs"), deps_of(request)
    now = deps.clock.now()
    month = Range.month_of(now, viewer.timezone)
    span = date_range(request, now, month.days, viewer.timezone)
    with deps.database.report() as session:
        known = dimensions(session, viewer.scope)
        first = choice(request, "by", tuple(known), "key_id")
        second = choice(request, "and", ("", *known), "")
        chosen = tuple(dict.fromkeys(name for name in (first, second) if name))
        sums = _read(session, viewer.scope, span, chosen)
        wanted = [
            value
            for group in sums
            for name, value in zip(chosen, group, strict=True)
            if name in _BY_ID
        ]
        names = names_of(session, viewer.scope, wanted)
    table = _table(sums, chosen, known, names, viewer.currency)
    if wants_csv(request):
        return table.csv(f"costs-{span.first}-{span.last}")
    total = sum(each["amount"] for each in sums.values())
    presets, custom = day_presets(request, span, month.last)
    then = Input("and", "And by", "select", second, [("", "nothing else"), *known.items()])
    page_data = PageData(
        "Cost breakdown",
        f"Charges before tax and credits, by days of {viewer.timezone}.",
        tiles=[Tile("Spend", money(total, viewer.currency), f"{grouped(len(sums))} groups")],
        span=span,
        presets=presets,
        custom=custom,
        groups=known,
        by=first,
        narrow=[then],
        tables=[table],
        back=("/costs", "Costs"),
    )
    return show(request, page_data)


def link(span: Range, by: str) -> tuple[str, str]:
    asked = urlencode({"from": span.first, "to": span.last, "by": by if by in GROUPS else "key_id"})
    return f"{PATH}?{asked}", "Break down by two dimensions"


def _read(
    session: Session, scope: TenantScope, span: Range, chosen: Sequence[str]
) -> dict[_Group, dict[str, int]]:
    """The largest groups by amount, then all others as one group of empty names marked `…`."""
    query = BucketQuery(
        span.start,
        span.end,
        Width.DAY,
        tuple(chosen),
        min(Width.DAY.most, span.days),
        zone=span.zone,
    )
    found: dict[_Group, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_SUMS, 0))
    for bucket in buckets_by_label(session, scope, query).buckets:
        for row in bucket.rows:
            own = found[tuple(row.group[name] or "" for name in chosen)]
            for name in _SUMS:
                own[name] += row.counts.get(name, 0) + row.amounts.get(name, 0)
    ranked = sorted(found, key=lambda group: (-found[group]["amount"], group))
    kept = {group: found[group] for group in ranked[:MOST_ROWS]}
    rest = ranked[MOST_ROWS:]
    if rest:
        sums = {name: sum(found[group][name] for group in rest) for name in _SUMS}
        kept[(_OTHERS,) * len(chosen)] = sums
    return kept


_OTHERS = "\x1f others"  # no client sends a control character


def _table(
    sums: dict[_Group, dict[str, int]],
    chosen: Sequence[str],
    known: dict[str, str],
    names: dict[str, str],
    currency: str,
) -> Table:
    columns = [
        *(Column(name, known[name]) for name in chosen),
        Column("requests", "Requests", "whole"),
        Column("input_tokens", "Tokens in", "whole"),
        Column("output_tokens", "Tokens out", "whole"),
        Column("amount", "Cost", "money"),
    ]
    rows: list[dict[str, Any]] = [
        {name: _name(name, value, names) for name, value in zip(chosen, group, strict=True)} | own
        for group, own in sums.items()
    ]
    caption = "Spend by " + " and ".join(known[name].lower() for name in chosen)
    empty = "No charges in this period. Charges appear a few seconds after a request ends."
    return Table(caption, columns, rows, currency, empty=empty)


def _name(dimension: str, value: str, names: dict[str, str]) -> str:
    if value == _OTHERS:
        return "all others"
    return names.get(value) or value or _NONE.get(dimension, "without it")


ROUTES = [Route(PATH, page_of)]
