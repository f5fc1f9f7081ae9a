"""Table of the lines of bank statements."""

from datetime import date, datetime

from sqlalchemy import BigInteger, Date, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID
from core.database import Base, Json, UtcDateTime


class BankLine(Base):
    """unmatched -> matched by acts on money; a debit is ignored, and a person may dismiss a line."""

    __tablename__ = "bank_lines"
    __table_args__ = (
        UniqueConstraint("account", "bank_id"),
        Index("ix_bank_lines_status", "status", "booked_on"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    account: Mapped[str] = mapped_column(String(40))  # the seller's; "" if the file did not tell
    bank_id: Mapped[str] = mapped_column(String(140))
    booked_on: Mapped[date] = mapped_column(Date)
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount_minor: Mapped[int] = mapped_column(BigInteger)  # debits are below zero
    payer: Mapped[str] = mapped_column(String(200))
    payer_account: Mapped[str] = mapped_column(String(40))
    reference: Mapped[str] = mapped_column(String(140))  # structured
    text: Mapped[str] = mapped_column(Text)  # what the payer wrote
    status: Mapped[str] = mapped_column(String(20))  # matched | unmatched | ignored | dismissed
    note: Mapped[str] = mapped_column(Text)  # how it was matched, or why it was not
    acts: Mapped[list[str]] = mapped_column(Json, default=list)  # ids of acts on money
    tenant_id: Mapped[str | None] = mapped_column(ID)
    imported_at: Mapped[datetime] = mapped_column(UtcDateTime)
    imported_by: Mapped[str] = mapped_column(ID)
    decided_by: Mapped[str | None] = mapped_column(ID)  # who assigned or dismissed it
