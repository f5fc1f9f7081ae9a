"""Table of closed days."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from core import lengths
from core.database import Base, Json, UtcDateTime


class ClosedDay(Base):
    """Sums of the usage that was recorded on one day (UTC), frozen. Append-only. `digest` covers the
    row and the digest of the day before, so that a changed row breaks the chain."""

    __tablename__ = "closed_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # its start
    last_batch: Mapped[int] = mapped_column(
        BigInteger
    )  # the last one recorded on or before the day
    sums: Mapped[dict[str, Any]] = mapped_column(Json)
    digest: Mapped[str] = mapped_column(String(lengths.DIGEST))
    closed_at: Mapped[datetime] = mapped_column(UtcDateTime)
