"""The usage of a tenant and of all tenants below it, rolled up for it alone."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.amounts import money
from billing.organisations.organisations import all_links, names_of, paths_below, percent
from billing.organisations.tables import OrganisationLink
from billing.usage.tables import DailyTenantUsage
from core.errors import Forbidden
from core.money import round_half_away
from core.tenants.scope import TenantScope

_SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "amount")
_PPM = 10**6


def read(
    session: Session, scope: TenantScope, start: datetime, end: datetime, *, by_model: bool = False
) -> list[dict[str, Any]]:
    """The roll-up of the scope's tenant. Forbidden for who sees one of its projects alone."""
    if scope.project_id is not None:
        raise Forbidden(
            "Access to one project does not include other organisations.",
            next_step="Ask an owner or an admin of your organisation.",
        )
    return rollup(session, scope.tenant_id, start, end, by_model=by_model)


def rollup(
    session: Session, parent_id: str, start: datetime, end: datetime, *, by_model: bool = False
) -> list[dict[str, Any]]:
    """The usage of the tenant and of all below it, of the days from `start` until before `end`, by
    tenant and currency (and model). A child's counts from the day since which each link above it holds.
    Amounts are picounits; `markup` is the child's own, on its usage."""
    paths = paths_below(all_links(session), parent_id)
    names = names_of(session, [parent_id, *paths])
    rows = _usage(session, (parent_id,), start, end, by_model)
    shown = [{**_placed(parent_id, (), names), **row, "markup": 0} for row in rows]
    for child_id, path in paths.items():
        first = max(link.since for link in path).replace(hour=0, minute=0, second=0, microsecond=0)
        for row in _usage(session, (child_id,), max(start, first), end, by_model) or [_none()]:
            markup = round_half_away(row["amount"] * path[-1].markup_ppm, _PPM)
            shown.append({**_placed(child_id, path, names), **row, "markup": markup})
    return shown


def _placed(
    tenant_id: str, path: tuple[OrganisationLink, ...], names: dict[str, str]
) -> dict[str, Any]:
    link = path[-1] if path else None
    return {
        "tenant_id": tenant_id,
        "tenant": names.get(tenant_id, tenant_id),
        "level": len(path),
        "parent": names.get(link.parent_id, link.parent_id) if link else "",
        "pays": link.pays if link else "",
        "markup_percent": percent(link.markup_ppm) if link else "",
    }


def _none() -> dict[str, Any]:
    return {"currency": "", "model": "", **dict.fromkeys(_SUMS, 0)}


def _usage(
    session: Session, tenants: Sequence[str], start: datetime, end: datetime, by_model: bool
) -> list[dict[str, Any]]:
    table: Any = DailyTenantUsage
    group = [table.currency, *([table.model] if by_model else [])]
    query = select(*group, *(func.sum(getattr(table, name)) for name in _SUMS)).where(
        table.tenant_id.in_(tenants), table.at >= start, table.at < end
    )
    found = []
    for row in session.execute(query.group_by(*group).order_by(*group)):
        sums = dict(zip(_SUMS, (int(each) for each in row[len(group) :]), strict=True))
        found.append({"currency": row[0], "model": row[1] if by_model else "", **sums})
    return found


def rollup_json(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With exact amounts, and what each child owes its parent or the seller before tax and credit."""
    return [
        {
            **row,
            "amount": money(row["amount"], row["currency"]),
            "markup": money(row["markup"], row["currency"]),
            "with_markup": money(row["amount"] + row["markup"], row["currency"]),
        }
        for row in rows
    ]
