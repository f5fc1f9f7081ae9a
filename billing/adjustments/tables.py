"""Table of the acts on money that people ask for, and of who confirmed them."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID
from core.database import Base, Json, Units, UtcDateTime


class MoneyAct(Base):
    """waiting -> posted | rejected, or posted at once where no second person is needed."""

    __tablename__ = "money_acts"
    __table_args__ = (
        Index("ix_money_acts_status", "status", "requested_at"),
        Index("ix_money_acts_target", "target"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    tenant_id: Mapped[str] = mapped_column(ID)
    target: Mapped[str] = mapped_column(ID)  # id of the tenant, invoice, payment or act
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount: Mapped[int] = mapped_column(Units)
    terms: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    reason: Mapped[str] = mapped_column(Text, default="")
    reference: Mapped[str] = mapped_column(String(160), unique=True)  # idempotency key
    status: Mapped[str] = mapped_column(String(20))
    requested_by: Mapped[str] = mapped_column(ID)
    requested_at: Mapped[datetime] = mapped_column(UtcDateTime)
    decided_by: Mapped[str | None] = mapped_column(ID)
    decided_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    decision: Mapped[str] = mapped_column(Text, default="")  # why it was rejected
    result: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
