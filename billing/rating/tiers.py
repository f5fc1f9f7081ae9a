"""Tier positions: what a tenant has used of a component in a period, by price version.

Tiers and free units belong to the period, not to a version. The versions of one model and adapter that
apply to a tenant follow each other on one position, in the order in which they came into force. What is
rated late under an earlier version moves the later ones up, and its charge includes the difference, so
that the charges of a period sum to `total_of` its quantities in any order of events.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import Select, Table, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from billing.pricing.prices import version_of
from billing.pricing.pricing import PARTS, Component, PriceVersion, priced_quantities
from billing.pricing.tables import PriceVersionRow
from billing.rating.tables import TierPosition
from billing.usage.daily_sums import SUMS
from billing.usage.tables import DailyUsage
from core.events import UsageKind

POSITIONS: Table = TierPosition.__table__  # type: ignore[assignment]
Scope = tuple[str, str, str]  # model, adapter (either may be "*") and currency of a version
Key = tuple[str, str, Scope, Component]  # tenant, usage period
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_COUNT = {component: count for component, count, _ in SUMS}
# Kinds of usage that have a component of their own and no other.
ONLY: Mapping[str, Component] = {
    UsageKind.GPU_SECONDS: Component.GPU_SECOND,
    UsageKind.MODERATION: Component.MODERATION,
}


def scope_of(version: PriceVersion) -> Scope:
    return version.model, version.adapter, version.currency


def total_of(component: Component, used: Iterable[tuple[PriceVersion, int]]) -> int:
    """Picounits for a period's quantities by version of one scope."""
    ordered = sorted(used, key=lambda each: _order(each[0]))
    whole = sum(quantity for _, quantity in ordered)
    before = total = 0
    for version, quantity in ordered:
        total += version.part(component, before, quantity, whole)
        before += quantity
    return total


@dataclass
class Versions:
    """Price versions by id, with all others that share a position with them."""

    by_id: dict[str, PriceVersion]
    _by_scope: dict[Scope, list[PriceVersion]] = field(default_factory=dict)
    _linear: dict[tuple[str, str], dict[Component, int]] = field(default_factory=dict)

    def sharing(self, tenant_id: str, version: PriceVersion) -> list[PriceVersion]:
        """The versions on the tenant's position of this one, in order, itself included."""
        return [
            each
            for each in self._by_scope[scope_of(version)]
            if each.tenant_id in ("", tenant_id) or each.id == version.id
        ]

    def linear(self, tenant_id: str, version: PriceVersion) -> dict[Component, int]:
        """Picounits per unit of the components whose price does not depend on earlier usage and
        whose usage does not move a later tier.
        """
        found = self._linear.get((tenant_id, version.id))
        if found is None:
            shared = self.sharing(tenant_id, version)
            found = {
                component: version.linear.get(component, 0)
                for component in Component
                if all(component in v.linear or component not in v.rates for v in shared)
            }
            self._linear[(tenant_id, version.id)] = found
        return found


def load_versions(session: Session, ids: set[str], tenant_ids: set[str]) -> Versions:
    """The versions with these ids, and those of the same scopes that apply to the tenants."""
    row = PriceVersionRow
    scopes = {tuple(each) for each in session.execute(_scopes(ids))}
    if not scopes:
        return Versions({})
    rows = session.scalars(
        select(row).where(
            tuple_(row.model, row.adapter, row.currency).in_(scopes),
            row.id.in_(ids) | row.tenant_id.in_(tenant_ids | {""}),
        )
    )
    versions = sorted((version_of(each) for each in rows), key=_order)
    found = Versions({each.id: each for each in versions if each.id in ids})
    for each in versions:
        found._by_scope.setdefault(scope_of(each), []).append(each)
    return found


def _scopes(ids: set[str]) -> Select[str, str, str]:
    row = PriceVersionRow
    return select(row.model, row.adapter, row.currency).where(row.id.in_(ids)).distinct()


@dataclass
class Positions:
    """Cached positions. Hold the tenants' locks while using it."""

    session: Session
    versions: Versions
    _used: dict[Key, dict[str, int]] = field(default_factory=dict)  # quantities by version id
    _shared: dict[Key, list[PriceVersion]] = field(default_factory=dict)

    def charge(
        self,
        tenant_id: str,
        period_id: str,
        version: PriceVersion,
        component: Component,
        quantity: int,
    ) -> int:
        """Advance the position by `quantity`; returns the added picounits."""
        key = (tenant_id, period_id, scope_of(version), component)
        used = self._used.get(key)
        if used is None:
            shared = self._shared[key] = self.versions.sharing(tenant_id, version)
            used = self._used[key] = self._read(key, [each.id for each in shared])
        before = used[version.id]
        if len(used) == 1:
            used[version.id] = before + quantity
            return version.marginal(component, before, quantity)
        charged = self._total(key)
        used[version.id] = before + quantity
        return self._total(key) - charged

    def store(self) -> None:
        rows = [
            {
                "usage_period_id": period_id,
                "price_version": version_id,
                "component": component.value,
                "tenant_id": tenant_id,
                "quantity": quantity,
            }
            for (tenant_id, period_id, _, component), used in self._used.items()
            for version_id, quantity in used.items()
        ]
        if not rows:
            return
        rows.sort(key=lambda row: (row["usage_period_id"], row["price_version"], row["component"]))
        dialect = self.session.get_bind().dialect.name
        insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
        statement = insert(POSITIONS)
        statement = statement.on_conflict_do_update(
            index_elements=["usage_period_id", "price_version", "component"],
            set_={"quantity": statement.excluded.quantity},
        )
        self.session.execute(statement, rows)

    def _total(self, key: Key) -> int:
        used = self._used[key]
        return total_of(key[3], ((each, used[each.id]) for each in self._shared[key]))

    def _read(self, key: Key, version_ids: list[str]) -> dict[str, int]:
        _, period_id, _, component = key
        row = TierPosition
        stored = self.session.execute(
            select(row.price_version, row.quantity).where(
                row.usage_period_id == period_id,
                row.price_version.in_(version_ids),
                row.component == component.value,
            )
        )
        found = {version_id: int(quantity) for version_id, quantity in stored}
        missing = [each for each in version_ids if each not in found]
        if missing and len(version_ids) > 1:
            found |= self._summed(key, missing)
        return dict.fromkeys(version_ids, 0) | found

    def _summed(self, key: Key, version_ids: list[str]) -> dict[str, int]:
        """What was used before the first version with tiers, when no position was needed."""
        tenant_id, period_id, _, component = key
        use = DailyUsage
        kinds = [kind for kind, only in ONLY.items() if only is not component]
        columns = (component, *(part for part in PARTS if part is not component))
        rows = self.session.execute(
            select(use.price_version, *(func.sum(_COUNT[each]) for each in columns))
            .where(
                use.tenant_id == tenant_id,
                use.usage_period_id == period_id,
                use.price_version.in_(version_ids),
                use.kind.not_in(kinds),
            )
            .group_by(use.price_version)
        )
        rates = {each.id: each.rates for each in self._shared[key]}
        found = {}
        for version_id, *counts in rows:
            used = zip(columns, map(int, counts), strict=True)
            found[version_id] = priced_quantities(rates[version_id], used).get(component, 0)
        return found


def _order(version: PriceVersion) -> tuple[datetime, str]:
    return version.effective_from or _EARLIEST, version.id
