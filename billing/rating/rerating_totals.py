"""What re-ratings change in a tenant's period: the price of its quantities as corrected, less what was
charged and adjusted so far.

All versions of a scope share one position, so the whole scope is priced again, not only what
moves. Re-ratings of the same events replace each other: the latest one counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select, tuple_
from sqlalchemy.orm import Session

from billing.pricing.component_columns import amount_of, count_of
from billing.pricing.prices import version_of
from billing.pricing.pricing import Component, PriceVersion, priced_as
from billing.pricing.tables import PriceVersionRow
from billing.rating.tables import Rerate
from billing.rating.tiers import ONLY, Scope, scope_of, total_of
from billing.usage.reading import charged_sums
from billing.usage.tables import Adjustment, Charge, UsageEventRow

_C, _E = Charge, UsageEventRow
Place = tuple[str, str, Component]  # tenant, usage period
_Used = dict[tuple[str, str, Component, str], list[int]]  # and version: quantity and picounits


@dataclass(frozen=True, slots=True)
class Move:
    """Events of one version in a time range that cost what another version says."""

    from_version: str
    to_version: str
    starts_at: datetime
    ends_at: datetime
    tenant_id: str = ""  # "" is every tenant


def differences(session: Session, wanted: Move, touched: set[tuple[str, str]]) -> dict[Place, int]:
    """Picounits to post for each component of the tenants' periods."""
    tenants = {tenant_id for tenant_id, _ in touched}
    moves = [wanted, *_earlier(session, tenants)]  # the newest first
    versions = _versions(session, moves)
    sums = _sums(session, touched, _C.price_version.in_(versions))
    quantities = {key: quantity for key, (quantity, _) in sums.items()}
    found: dict[Place, int] = defaultdict(int)
    for (tenant_id, period_id, component, _), (_, units) in sums.items():
        found[(tenant_id, period_id, component)] -= units
    for tenant_id in sorted(tenants):
        own = {each for each in touched if each[0] == tenant_id}
        for move in _in_effect(moves, tenant_id):
            _apply(session, quantities, move, own)
    scopes: dict[tuple[Place, Scope], list[tuple[PriceVersion, int]]] = defaultdict(list)
    for (tenant_id, period_id, component, version_id), quantity in quantities.items():
        version = versions[version_id]
        place = (tenant_id, period_id, priced_as(version.rates, component))
        scopes[(place, scope_of(version))].append((version, quantity))
    for (place, _), used in scopes.items():
        found[place] += total_of(place[2], used)
    for place, units in _adjusted(session, touched):
        found[place] -= units
    return found


def _earlier(session: Session, tenants: set[str]) -> list[Move]:
    rows = session.scalars(
        select(Rerate)
        .where(Rerate.tenant_id.in_(tenants | {""}))
        .order_by(Rerate.posted_at.desc(), Rerate.id.desc())
    )
    return [
        Move(row.from_version, row.to_version, row.starts_at, row.ends_at, row.tenant_id)
        for row in rows
    ]


def _in_effect(moves: Iterable[Move], tenant_id: str) -> list[Move]:
    """The tenant's moves that no newer one replaces. Ranges of one version do not overlap in part."""
    found: list[Move] = []
    for move in moves:
        if move.tenant_id in ("", tenant_id) and not any(
            other.from_version == move.from_version
            and other.starts_at <= move.starts_at
            and other.ends_at >= move.ends_at
            for other in found
        ):
            found.append(move)
    return found


def _apply(
    session: Session,
    quantities: dict[tuple[str, str, Component, str], int],
    move: Move,
    touched: set[tuple[str, str]],
) -> None:
    where = (
        _C.price_version == move.from_version,
        _E.occurred_at >= move.starts_at,
        _E.occurred_at < move.ends_at,
    )
    for (tenant_id, period_id, component, _), (quantity, _) in _sums(
        session, touched, *where
    ).items():
        place = (tenant_id, period_id, component)
        quantities[(*place, move.from_version)] -= quantity
        key = (*place, move.to_version)
        quantities[key] = quantities.get(key, 0) + quantity


def _versions(session: Session, moves: Sequence[Move]) -> dict[str, PriceVersion]:
    """The versions of the moves, and all that share a position with them."""
    row = PriceVersionRow
    named = {each for move in moves for each in (move.from_version, move.to_version)}
    scopes = session.execute(select(row.model, row.adapter).where(row.id.in_(named)).distinct())
    pairs = [tuple(each) for each in scopes]
    rows = session.scalars(select(row).where(tuple_(row.model, row.adapter).in_(pairs)))
    return {each.id: version_of(each) for each in rows}


def _sums(session: Session, touched: set[tuple[str, str]], *where: ColumnElement[bool]) -> _Used:
    """Quantity and picounits charged, by tenant, period, component and version."""
    key = (_C.tenant_id, _C.usage_period_id, _C.price_version, _E.kind)
    sums: list[Any] = []
    for component in Component:
        sums += [count_of(component, _C), amount_of(component, _C)]
    inside = _C.usage_period_id.in_({period_id for _, period_id in touched})
    rows = charged_sums(session, key, sums, (inside, *where))
    found: _Used = {}
    for tenant_id, period_id, version_id, kind, *values in rows:
        for index, component in enumerate(Component):
            quantity, units = int(values[2 * index]), int(values[2 * index + 1])
            if not (quantity or units) or ONLY.get(kind, component) is not component:
                continue
            entry = found.setdefault((tenant_id, period_id, component, version_id), [0, 0])
            entry[0] += quantity
            entry[1] += units
    return found


def _adjusted(session: Session, touched: set[tuple[str, str]]) -> list[tuple[Place, int]]:
    row = Adjustment
    key = (row.tenant_id, row.usage_period_id, row.component)
    periods = {period_id for _, period_id in touched}
    rows = session.execute(
        select(*key, func.sum(row.amount))
        .where(row.rerate_id.is_not(None), row.usage_period_id.in_(periods))
        .group_by(*key)
    )
    return [((who, period_id, Component(name)), int(units)) for who, period_id, name, units in rows]
