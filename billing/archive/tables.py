"""Tables of the frozen sums of closed days."""

from datetime import datetime

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import ID, Amounts, Quantities
from core.database import Base, Units, UtcDateTime


class ClosedCharges(Quantities, Amounts, Base):
    """The charges of a closed day by periods and price. Append-only. `tokens`: generations and
    embeddings, whose requests and tokens are priced."""

    __tablename__ = "closed_charges"
    __table_args__ = (
        Index("ix_closed_charges_usage_period", "usage_period_id"),
        Index("ix_closed_charges_bill_period", "bill_period_id"),
    )

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    usage_period_id: Mapped[str] = mapped_column(ID, primary_key=True)
    bill_period_id: Mapped[str] = mapped_column(ID, primary_key=True)
    price_version: Mapped[str] = mapped_column(ID, primary_key=True)
    tokens: Mapped[bool] = mapped_column(primary_key=True)


class ClosedUnits(Base):
    """Ledger entries by account, or credit uses by grant, that a closed day froze. Append-only."""

    __tablename__ = "closed_units"
    __table_args__ = (Index("ix_closed_units_key", "kind", "key"),)

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    kind: Mapped[str] = mapped_column(String(10), primary_key=True)  # account | grant
    key: Mapped[str] = mapped_column(ID, primary_key=True)
    units: Mapped[int] = mapped_column(Units)
