"""Tables of closed days and their frozen sums."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import ID, ORDERED_ID, Amounts, Quantities
from core import lengths
from core.database import Base, Json, Units, UtcDateTime


class ClosedDay(Base):
    """Sums of the usage that was recorded on one day (UTC), frozen. Append-only. `digest` covers the
    row, its frozen groups and the digest of the day before, so that a changed row breaks the chain;
    `signature` signs the digest with a key that the database does not hold."""

    __tablename__ = "closed_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # its start
    last_batch: Mapped[int] = mapped_column(
        BigInteger
    )  # the last one recorded on or before the day
    sums: Mapped[dict[str, Any]] = mapped_column(Json)
    # last_entry, last_use: up to which ledger entries and credit uses are frozen; seen_entry,
    # seen_use: the last ones when the day was closed; groups: digest of the frozen groups.
    frozen: Mapped[dict[str, Any]] = mapped_column(Json)
    digest: Mapped[str] = mapped_column(String(lengths.DIGEST))
    signature: Mapped[str] = mapped_column(String(100))  # "" or "key id:hex"
    closed_at: Mapped[datetime] = mapped_column(UtcDateTime)


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


class MovedDay(Base):
    """A closed day whose events and charges the store of moved days has, verified. They are read from
    there, and dropped here some time later. Its batches are those after `after_batch` up to
    `last_batch`."""

    __tablename__ = "moved_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    after_batch: Mapped[int] = mapped_column(BigInteger)
    last_batch: Mapped[int] = mapped_column(BigInteger)
    store: Mapped[str] = mapped_column(String(100))  # the identity of the store
    floor_id: Mapped[str] = mapped_column(ORDERED_ID)  # its requests have ids before this one
    moved_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # None: it is being copied
    dropped_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
