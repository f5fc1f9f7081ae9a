"""Table of the months that people signed off."""

from datetime import datetime
from typing import Any

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import ID
from core.database import Base, Json, UtcDateTime


class SignedMonth(Base):
    """One row a person: the checklist and the trial balance as they saw them."""

    __tablename__ = "signed_months"

    month: Mapped[str] = mapped_column(String(7), primary_key=True)  # "2026-01", in UTC
    signed_by: Mapped[str] = mapped_column(ID, primary_key=True)
    signed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    note: Mapped[str] = mapped_column(Text, default="")
    checklist: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    balances: Mapped[dict[str, Any]] = mapped_column(Json)  # picounits by currency and account
