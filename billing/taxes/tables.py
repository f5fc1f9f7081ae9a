"""Tables of tax rates, exemptions and stored quotes."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import ID, NAME
from core import lengths
from core.database import Base, BigKey, Json, UtcDateTime


class TaxRate(Base):
    """A tax rate of a region, in parts per million, with effective dates."""

    __tablename__ = "tax_rates"
    __table_args__ = (Index("ix_tax_rates_region", "region", "effective_from"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    region: Mapped[str] = mapped_column(String(20))  # "DE", "US-NY"
    name: Mapped[str] = mapped_column(NAME)  # "VAT"
    rate_ppm: Mapped[int]
    effective_from: Mapped[datetime] = mapped_column(UtcDateTime)
    effective_to: Mapped[datetime | None] = mapped_column(UtcDateTime)


class TaxExemption(Base):
    """An exemption certificate of a tenant. Supplies before its end stay exempt."""

    __tablename__ = "tax_exemptions"
    __table_args__ = (Index("ix_tax_exemptions_tenant", "tenant_id", "valid_from"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    number: Mapped[str] = mapped_column(String(80))
    region: Mapped[str] = mapped_column(String(20), default="")  # "" covers every region
    valid_from: Mapped[datetime] = mapped_column(UtcDateTime)
    valid_to: Mapped[datetime | None] = mapped_column(UtcDateTime)
    recorded_by: Mapped[str] = mapped_column(ID)
    recorded_at: Mapped[datetime] = mapped_column(UtcDateTime)


class TaxQuote(Base):
    """The answer of a remote tax service to one request."""

    __tablename__ = "tax_quotes"

    digest: Mapped[str] = mapped_column(String(lengths.DIGEST), primary_key=True)  # of the request
    taxes: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    asked_at: Mapped[datetime] = mapped_column(UtcDateTime)
