"""Tables of price versions, exchange rates and the prices of engines."""

from datetime import date, datetime
from typing import Any

from sqlalchemy import Date, Index, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID, NAME
from core.database import Base, Json, Units, UtcDateTime


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


class ExchangeRate(Base):
    """What one unit of `base` is worth in `quote` on a day."""

    __tablename__ = "exchange_rates"

    day: Mapped[date] = mapped_column(Date, primary_key=True)
    base: Mapped[str] = mapped_column(CURRENCY, primary_key=True)
    quote: Mapped[str] = mapped_column(CURRENCY, primary_key=True)
    rate: Mapped[int] = mapped_column(Units)  # times 10^12
    recorded_at: Mapped[datetime] = mapped_column(UtcDateTime)
    recorded_by: Mapped[str] = mapped_column(ID, default="")


class EnginePrice(Base):
    """What an hour of an engine costs the operator, from a day on until the pool's next price."""

    __tablename__ = "engine_prices"

    pool: Mapped[str] = mapped_column(NAME, primary_key=True)  # a pattern of engines' names
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of a day
    currency: Mapped[str] = mapped_column(CURRENCY)
    per_hour: Mapped[int] = mapped_column(Units)  # picounits
    note: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(NAME, default="")
