"""Tier positions of tenants on non-linear prices, read and written once per batch."""

from dataclasses import dataclass, field

from sqlalchemy import Table, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from billing.models import TierPosition
from billing.pricing import Component, PriceVersion

POSITIONS: Table = TierPosition.__table__  # type: ignore[assignment]
Key = tuple[str, str, Component]  # usage period, price version, component


@dataclass
class Positions:
    """Cached tier positions. Hold the tenants' locks while using it."""

    session: Session
    _at: dict[Key, int] = field(default_factory=dict)
    _tenant: dict[Key, str] = field(default_factory=dict)

    def charge(
        self,
        tenant_id: str,
        period_id: str,
        version: PriceVersion,
        component: Component,
        quantity: int,
    ) -> int:
        """Advance the position by `quantity`; returns the added picounits."""
        if component not in version.rates:
            return 0
        key = (period_id, version.id, component)
        before = self._at.get(key)
        if before is None:
            before = self._read(key)
        self._at[key] = before + quantity
        self._tenant[key] = tenant_id
        return version.marginal(component, before, quantity)

    def store(self, session: Session) -> None:
        rows = [
            {
                "usage_period_id": key[0],
                "price_version": key[1],
                "component": key[2].value,
                "tenant_id": self._tenant[key],
                "quantity": quantity,
            }
            for key, quantity in sorted(self._at.items())
        ]
        if not rows:
            return
        dialect = session.get_bind().dialect.name
        insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
        statement = insert(POSITIONS)
        statement = statement.on_conflict_do_update(
            index_elements=["usage_period_id", "price_version", "component"],
            set_={"quantity": statement.excluded.quantity},
        )
        session.execute(statement, rows)

    def _read(self, key: Key) -> int:
        found = self.session.scalar(
            select(TierPosition.quantity).where(
                TierPosition.usage_period_id == key[0],
                TierPosition.price_version == key[1],
                TierPosition.component == key[2].value,
            )
        )
        return found or 0
