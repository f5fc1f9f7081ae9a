"""Tables of price versions, tier positions, re-ratings and adjustments."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID, NAME
from core.database import Base, BigKey, Json, Units, UtcDateTime


class PriceVersionRow(Base):
    """A price with effective dates. Its terms never change; an open end can be set once."""

    __tablename__ = "price_versions"
    __table_args__ = (
        Index("ix_price_versions_scope", "model", "tenant_id", "adapter", "effective_from"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, default="")  # "" is the list price
    model: Mapped[str] = mapped_column(NAME)  # "*" is every model
    adapter: Mapped[str] = mapped_column(NAME, default="*")  # "*" is any adapter, or none
    currency: Mapped[str] = mapped_column(CURRENCY)
    effective_from: Mapped[datetime] = mapped_column(UtcDateTime)
    effective_to: Mapped[datetime | None] = mapped_column(UtcDateTime)
    terms: Mapped[dict[str, Any]] = mapped_column(Json)
    note: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(NAME, default="")


class TierPosition(Base):
    """Quantity of a component that a tenant has used in a period under a non-linear price.

    Rating updates it once per batch under the tenant's lock, so that charges sum to the price of
    the total quantity.
    """

    __tablename__ = "tier_positions"

    usage_period_id: Mapped[str] = mapped_column(ID, primary_key=True)
    price_version: Mapped[str] = mapped_column(ID, primary_key=True)
    component: Mapped[str] = mapped_column(String(20), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    quantity: Mapped[int] = mapped_column(BigInteger)


class Rerate(Base):
    """A re-rating of events from a wrong price version to the right one."""

    __tablename__ = "rerates"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    from_version: Mapped[str] = mapped_column(ID)
    to_version: Mapped[str] = mapped_column(ID)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant_id: Mapped[str] = mapped_column(ID, default="")  # "" is every tenant
    posted_at: Mapped[datetime] = mapped_column(UtcDateTime)
    posted_by: Mapped[str] = mapped_column(NAME, default="")
    note: Mapped[str] = mapped_column(Text, default="")


class Adjustment(Base):
    """A correction of rated usage without an event: re-rating, goodwill. Append-only."""

    __tablename__ = "adjustments"
    __table_args__ = (Index("ix_adjustments_bill_period", "bill_period_id"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    rerate_id: Mapped[str | None] = mapped_column(ID)
    tenant_id: Mapped[str] = mapped_column(ID)
    project_id: Mapped[str] = mapped_column(ID, default="")
    model: Mapped[str] = mapped_column(NAME, default="")
    component: Mapped[str] = mapped_column(String(20), default="")
    quantity: Mapped[int] = mapped_column(BigInteger, default=0)
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount: Mapped[int] = mapped_column(Units)
    usage_period_id: Mapped[str] = mapped_column(ID)
    bill_period_id: Mapped[str] = mapped_column(ID)
    transaction_id: Mapped[str] = mapped_column(ID)
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
