"""The table of exchange rates, for reports in one currency."""

from datetime import date, datetime

from sqlalchemy import Date
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID
from core.database import Base, Units, UtcDateTime


class ExchangeRate(Base):
    """What one unit of `base` is worth in `quote` on a day."""

    __tablename__ = "exchange_rates"

    day: Mapped[date] = mapped_column(Date, primary_key=True)
    base: Mapped[str] = mapped_column(CURRENCY, primary_key=True)
    quote: Mapped[str] = mapped_column(CURRENCY, primary_key=True)
    rate: Mapped[int] = mapped_column(Units)  # times 10^12
    recorded_at: Mapped[datetime] = mapped_column(UtcDateTime)
    recorded_by: Mapped[str] = mapped_column(ID, default="")
