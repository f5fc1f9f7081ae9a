"""What the query bar of Requests and Usage shows: the query, periods, and facets with counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import func, literal, select, union_all
from sqlalchemy.orm import Session
from starlette.requests import Request

from billing.usage.day_range import Range
from billing.usage.tables import DailyService, HourlyService
from billing.usage.usage_buckets import Width
from core.errors import BadRequest
from core.tenants.models import ApiKey, Member, Project
from core.tenants.scope import TenantScope
from dashboards.query import Query, parse

PRESETS = {
    "today": "Today",
    "7d": "7 days",
    "30d": "30 days",
    "month": "Month to date",
    "lastmonth": "Last month",
}
_FACETS = {
    "model": "Model",
    "adapter": "Adapter",
    "key_id": "Key",
    "project_id": "Project",
    "member_id": "Member",
}
_FIELDS = {"key_id": "key", "project_id": "project", "member_id": "member"}
_MOST_VALUES = 8  # of a facet
_KEPT = ("q", "by", "sort", "compare")


@dataclass(frozen=True, slots=True)
class Link:
    words: str
    href: str
    on: bool = False
    count: int | None = None


@dataclass(frozen=True, slots=True)
class CustomPeriod:
    """The form of a first and a last day."""

    span: Range
    today: date  # the last day that can be chosen
    on: bool = False  # no preset is the period that is shown
    kept: Sequence[tuple[str, str]] = ()  # other parameters of the page

    @property
    def words(self) -> str:
        first, last = self.span.first, self.span.last
        return f"{first:%d %b %Y} to {last:%d %b %Y}" if self.on else "Custom"


@dataclass(frozen=True, slots=True)
class Bar:
    text: str
    presets: Sequence[Link] = ()
    custom: CustomPeriod | None = None
    facets: Sequence[tuple[str, Sequence[Link]]] = ()
    kept: Sequence[tuple[str, str]] = ()  # other parameters of the page
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Explored:
    query: Query
    span: Range


def read_query(request: Request, today: date, usual_days: int, sees_costs: bool) -> Explored:
    """`q` of the URL, and `from`, `to` and `show` as terms of it."""
    query = parse(text_of(request))
    if not sees_costs and any(term.field == "cost" for term in query.terms):
        raise BadRequest(
            "Your role does not see costs.", next_step="Remove cost from the query.", param="q"
        )
    return Explored(query, query.span(today, usual_days))


def text_of(request: Request) -> str:
    asked = request.query_params
    shown = {"failed": "status:5xx", "refused": "status:4xx"}.get(asked.get("show", ""), "")
    days = [
        f"{field}:{asked[name]}" for name, field in _TERMS.items() if asked.get(name, "").strip()
    ]
    return " ".join(part for part in (asked.get("q", "").strip(), shown, *days) if part)


_TERMS = {"from": "since", "to": "until"}


def address(request: Request, **changes: str) -> str:
    """This page with changed parameters; a cursor is dropped, as it belongs to the old query."""
    asked = request.query_params
    kept = {name: asked[name] for name in _KEPT if asked.get(name)}
    kept["q"] = text_of(request)
    found = {name: value for name, value in (kept | changes).items() if value}
    return f"?{urlencode(found)}"


def bar_of(
    request: Request, session: Session, scope: TenantScope, explored: Explored, today: date
) -> Bar:
    query = explored.query
    presets = []
    for since, words in PRESETS.items():
        wanted = query.over(since)
        on = wanted.span(today, 1) == explored.span
        presets.append(Link(words, address(request, q=str(wanted)), on))
    kept = [(name, request.query_params.get(name, "")) for name in ("by", "sort", "compare")]
    kept = [pair for pair in kept if pair[1]]
    other = [("q", str(query.over(""))), *kept]
    custom = CustomPeriod(explored.span, today, not any(each.on for each in presets), other)
    counts = _counts(session, scope, explored.span)
    facets = []
    for column, title in _FACETS.items():
        values = counts.values[column]
        if len(values) > 1:
            names = _names(session, scope, column, [value for value, _ in values])
            facets.append((title, _facet(request, query, column, values, names)))
    facets.append(("Status", _statuses(request, query, counts)))
    return Bar(str(query), presets, custom, facets, kept)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Requests in the date range, whatever else is filtered: the most frequent values of each column,
    and all, those refused and those failed."""

    values: dict[str, list[tuple[str, int]]]
    answers: int
    refused: int
    failed: int


def _counts(session: Session, scope: TenantScope, span: Range) -> _Counts:
    """One pass over the roll-up, and one round trip."""
    table: Any = HourlyService if span.width is Width.HOUR else DailyService
    columns = [getattr(table, name) for name in _FACETS]
    sums = [func.sum(getattr(table, name)).label(name) for name in _OUTCOMES]
    query = select(*columns, *sums).where(
        table.tenant_id == scope.tenant_id, table.at >= span.start, table.at < span.end
    )
    if scope.project_id:
        query = query.where(table.project_id == scope.project_id)
    base = query.group_by(*columns).cte("counted")
    whole = [func.sum(base.c[name]) for name in _OUTCOMES]
    parts = [select(literal("").label("facet"), literal("").label("value"), *whole).subquery()]
    for name in _FACETS:
        value, most = base.c[name], whole[0].desc()
        grouped = select(literal(name), value, *whole).group_by(value).order_by(most, value)
        parts.append(grouped.limit(_MOST_VALUES).subquery())
    values: dict[str, list[tuple[str, int]]] = {name: [] for name in _FACETS}
    all_of = [0, 0, 0]
    for facet, value, *numbers in session.execute(union_all(*(select(part) for part in parts))):
        if facet:
            values[facet].append((value, int(numbers[0])))
        else:
            all_of = [int(number or 0) for number in numbers]
    return _Counts(values, *all_of)


_OUTCOMES = ("answers", "refused", "failed")


def _facet(
    request: Request,
    query: Query,
    column: str,
    found: Sequence[tuple[str, int]],
    names: Mapping[str, str],
) -> list[Link]:
    field = _FIELDS.get(column, column)
    links = []
    for key, number in found:
        name = names.get(key, key) or "none"
        href = address(request, q=str(query.toggled(field, name)))
        links.append(Link(name, href, query.has(field, name), number))
    return links


def _names(session: Session, scope: TenantScope, column: str, ids: Sequence[str]) -> dict[str, str]:
    """Names by id where they are unique in the facet."""
    named: dict[str, tuple[Any, Any]] = {
        "key_id": (ApiKey, ApiKey.name),
        "project_id": (Project, Project.name),
        "member_id": (Member, Member.email),
    }
    if column not in named:
        return {}
    table, label = named[column]
    query = select(table.id, label).where(table.tenant_id == scope.tenant_id, table.id.in_(ids))
    found = {row[0]: row[1] for row in session.execute(query)}
    names = list(found.values())
    plain = {name for name in names if name and not set(name) & set(',"')}
    return {id: name for id, name in found.items() if name in plain and names.count(name) == 1}


def _statuses(request: Request, query: Query, counts: _Counts) -> list[Link]:
    answered = counts.answers - counts.refused - counts.failed
    return [
        Link(
            words,
            address(request, q=str(query.toggled("status", value))),
            query.has("status", value),
            count,
        )
        for value, words, count in (
            ("2xx", "Answered", answered),
            ("4xx", "Rejected", counts.refused),
            ("5xx", "Server errors", counts.failed),
        )
    ]


def day_presets(request: Request, span: Range, today: date) -> tuple[list[Link], CustomPeriod]:
    """Periods of a page whose URL has `from` and `to` instead of a query."""
    asked = request.query_params
    kept = [(name, asked[name]) for name in ("by", "compare") if asked.get(name)]
    links = []
    for since, words in PRESETS.items():
        own = Query(since=since).span(today, 1).of(span.zone)
        days = [("from", str(own.first)), ("to", str(own.last))]
        links.append(Link(words, f"?{urlencode([*days, *kept])}", own == span))
    return links, CustomPeriod(span, today, not any(each.on for each in links), kept)


def before(span: Range) -> Range:
    """The period of the same length that ends where this one begins."""
    length = span.last - span.first
    last = span.first - (span.first.resolution)
    return Range(last - length, last, span.zone)
