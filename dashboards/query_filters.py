"""A query as conditions on usage events, and on the roll-ups where they know every term of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from billing.usage.tables import WRONG, Charge, UsageEventRow
from core.errors import BadRequest
from core.money import PICO
from core.tenants.models import ApiKey, Member, Project
from core.tenants.scope import TenantScope
from dashboards.query import Query, Term

_NAMED: dict[str, tuple[Any, Any, str]] = {
    "key": (ApiKey, ApiKey.name, "key_id"),
    "project": (Project, Project.name, "project_id"),
    "member": (Member, Member.email, "member_id"),
}
# By field: the column of the roll-ups.
_ROLLED_UP = {
    "model": "model",
    "adapter": "adapter",
    "key": "key_id",
    "project": "project_id",
    "member": "member_id",
}
_EVENT = {
    "user": UsageEventRow.end_user,
    "route": UsageEventRow.route,
    "engine": UsageEventRow.engine_id,
    "end": UsageEventRow.finish_reason,
    "model": UsageEventRow.model,
}
_NUMBER: dict[str, Any] = {
    "cost": func.coalesce(Charge.amount, 0),
    "input": UsageEventRow.input_tokens,
    "cached": UsageEventRow.cached_tokens,
    "output": UsageEventRow.output_tokens,
    "first": UsageEventRow.first_token_ms,
    "time": UsageEventRow.duration_ms,
}


@dataclass(frozen=True, slots=True)
class Filters:
    """`events` always holds the whole query; `rolled_up` too, unless it is None."""

    events: tuple[ColumnElement[bool], ...] = ()
    rolled_up: dict[str, tuple[str, ...]] | None = None


def filters_of(session: Session, scope: TenantScope, query: Query) -> Filters:
    """BadRequest if a key, project or member is not the tenant's."""
    events, rolled_up = [], {}
    simple = True
    for term in query.terms:
        values = _ids(session, scope, term) if term.field in _NAMED else term.values
        events.append(_condition(term, values))
        column = _ROLLED_UP.get(term.field)
        if column is None or term.excluded or column in rolled_up:
            simple = False
        else:
            rolled_up[column] = tuple("" if value == "none" else value for value in values)
    return Filters(tuple(events), rolled_up if simple else None)


def _ids(session: Session, scope: TenantScope, term: Term) -> tuple[str, ...]:
    table, name, _ = _NAMED[term.field]
    query = select(table.id, name).where(
        table.tenant_id == scope.tenant_id, or_(name.in_(term.values), table.id.in_(term.values))
    )
    found = session.execute(query).all()
    known = {part for row in found for part in row}
    for value in term.values:
        if value not in known and value != "none":
            raise BadRequest(
                f"There is no {term.field} {value[:40]!r}.",
                next_step=f"Choose one of the filters, or see the page of {term.field}s.",
                param="q",
            )
    none = ["none"] if "none" in term.values else []
    return (*(row[0] for row in found), *none)


def _condition(term: Term, values: Sequence[str]) -> ColumnElement[bool]:
    event = UsageEventRow
    if term.field in _NUMBER:
        found = _compared(term)
    elif term.field == "status":
        found = or_(*(_status(value) for value in values))
    elif term.field == "id":
        found = or_(event.request_id.in_(values), event.client_request_id.in_(values))
    else:
        column: Any = _EVENT.get(term.field)
        if column is None:
            column = getattr(event, _ROLLED_UP[term.field])
        found = column.in_(values)
        if "none" in values:
            found = or_(found, column.is_(None))
    if not term.excluded:
        return found
    return or_(~found, found.is_(None))


def _status(value: str) -> ColumnElement[bool]:
    status = UsageEventRow.status
    first = int(value[0]) * 100 if value[0].isdigit() else 400
    last = first + 100 if value.endswith("xx") else 1000
    found = (
        status == int(value)
        if (value.isascii() and value.isdecimal())
        else and_(status >= first, status < last)
    )
    # Said literally, so that the partial index of what went wrong serves it.
    return and_(WRONG, found) if first >= 400 else found


def _compared(term: Term) -> ColumnElement[bool]:
    column: Any = _NUMBER[term.field]
    number = int(term.number * PICO) if term.field == "cost" else float(term.number)
    compared: dict[str, ColumnElement[bool]] = {
        ":": column == number,
        ">": column > number,
        "<": column < number,
        ">=": column >= number,
        "<=": column <= number,
    }
    return compared[term.operator]
