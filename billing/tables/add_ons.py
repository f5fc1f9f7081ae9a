"""Tables of add-ons, and of the tenants that have them beside their plan."""

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID, NAME
from core.database import Base, BigKey, Units, UtcDateTime


class AddOn(Base):
    """A fee per unit and interval, beside plans of the same interval. It never changes."""

    __tablename__ = "add_ons"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    currency: Mapped[str] = mapped_column(CURRENCY)
    fee: Mapped[int] = mapped_column(Units)  # picounits per unit and interval
    interval: Mapped[str] = mapped_column(String(10))  # month | year
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AddOnHolding(Base):
    """A tenant's quantity of an add-on over a time range. A change ends one row and starts another."""

    __tablename__ = "add_on_holdings"
    __table_args__ = (
        CheckConstraint("quantity > 0", name="quantity_positive"),
        Index("ix_add_on_holdings_tenant", "tenant_id", "starts_at"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    add_on_id: Mapped[str] = mapped_column(ID)
    quantity: Mapped[int]
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
