"""Tables that tell a database which was restored from a backup from one that lost nothing."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID
from core.database import Base, BigKey, Json, UtcDateTime


class RestoreMark(Base):
    """A point in the history of this database. The latest one is also kept outside of it; a database
    without it has lost what came after its own latest mark."""

    __tablename__ = "restore_marks"

    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    token: Mapped[str] = mapped_column(String(40))  # random: two histories never share one
    epoch: Mapped[int]  # one more after each recovery
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    entry_id: Mapped[int] = mapped_column(
        BigInteger
    )  # highest ids of ledger entries, entries of the
    audit_id: Mapped[int] = mapped_column(BigInteger)  # audit log and commands to the provider
    command_id: Mapped[int] = mapped_column(BigInteger)
    numbers: Mapped[dict[str, Any]] = mapped_column(
        Json
    )  # by seller: next invoice, next credit note
    acts_sha256: Mapped[str] = mapped_column(String(64), default="")


class Recovery(Base):
    """A restore that was noticed, and what `tollhouse recover` did about it."""

    __tablename__ = "recoveries"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    found_at: Mapped[datetime] = mapped_column(UtcDateTime)
    reason: Mapped[str] = mapped_column(Text)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    report: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)


class ReservedNumber(Base):
    """A number of an invoice or a credit note that was issued before a restore. With a period, the
    invoice of that tenant and period gets it again; without one, nobody gets it."""

    __tablename__ = "reserved_numbers"
    __table_args__ = (Index("ix_reserved_numbers_tenant", "tenant_id", "period_start"),)

    seller_id: Mapped[str] = mapped_column(ID, primary_key=True)
    kind: Mapped[str] = mapped_column(String(20), primary_key=True)  # invoice | credit_note
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    label: Mapped[str] = mapped_column(String(40))
    tenant_id: Mapped[str] = mapped_column(ID, default="")
    period_start: Mapped[datetime | None] = mapped_column(UtcDateTime)
    document_id: Mapped[str] = mapped_column(ID, default="")
    external_id: Mapped[str | None] = mapped_column(String(120))  # at the payment provider
    currency: Mapped[str] = mapped_column(CURRENCY, default="")
    due_minor: Mapped[int | None] = mapped_column(BigInteger)  # as it was issued
    issued_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    reason: Mapped[str] = mapped_column(Text)
    reserved_at: Mapped[datetime] = mapped_column(UtcDateTime)
    used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
