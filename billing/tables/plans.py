"""Tables of who is billed how: sellers, plans, a tenant's billing account, subscriptions, taxes."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID, NAME
from core.database import Base, BigKey, Units, UtcDateTime


class Seller(Base):
    """Who sends the invoices. Numbers run without a gap, from this locked row."""

    __tablename__ = "sellers"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    address: Mapped[str] = mapped_column(Text, default="")
    tax_id: Mapped[str] = mapped_column(String(80), default="")
    number_prefix: Mapped[str] = mapped_column(String(20), default="TH")
    next_number: Mapped[int] = mapped_column(BigInteger, default=1)
    next_credit_note: Mapped[int] = mapped_column(BigInteger, default=1)


class Plan(Base):
    """What a subscription costs beside usage, in amounts of one currency a period."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    currency: Mapped[str] = mapped_column(CURRENCY)
    base_fee: Mapped[int] = mapped_column(Units, default=0)
    seat_fee: Mapped[int] = mapped_column(Units, default=0)
    included_seats: Mapped[int] = mapped_column(default=0)
    included_usage: Mapped[int] = mapped_column(Units, default=0)  # worth of usage a period
    minimum_commitment: Mapped[int] = mapped_column(Units, default=0)
    grace_hours: Mapped[int] = mapped_column(default=24)  # wait for late events, then final
    payment_terms_days: Mapped[int] = mapped_column(default=14)
    suspend_after_days: Mapped[int | None]  # unpaid that long past due; None never
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class BillingAccount(Base):
    """A tenant, seen by finance. Rating and closing of a tenant take turns by locking this row."""

    __tablename__ = "billing_accounts"
    __table_args__ = (CheckConstraint("anchor_day between 1 and 31", name="anchor_day"),)

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    seller_id: Mapped[str] = mapped_column(ID)
    currency: Mapped[str] = mapped_column(CURRENCY)
    timezone: Mapped[str] = mapped_column(String(64), default="UTC")
    anchor_day: Mapped[int] = mapped_column(default=1)  # short months end on their last day
    anchored_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # of the last change
    legal_name: Mapped[str] = mapped_column(String(200), default="")
    address: Mapped[str] = mapped_column(Text, default="")
    email: Mapped[str] = mapped_column(String(320), default="")
    tax_id: Mapped[str] = mapped_column(String(80), default="")
    tax_region: Mapped[str] = mapped_column(String(20), default="")
    tax_exempt: Mapped[bool] = mapped_column(default=False)
    collection: Mapped[str] = mapped_column(String(20), default="manual")  # manual | stripe
    status: Mapped[str] = mapped_column(String(20), default="active")  # past_due | suspended
    prepaid_only: Mapped[bool] = mapped_column(default=False)  # no use beyond the credit
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Subscription(Base):
    """A tenant is on a plan with so many seats, from then to then. A change ends one, begins one."""

    __tablename__ = "subscriptions"
    __table_args__ = (
        UniqueConstraint("tenant_id", "starts_at"),
        CheckConstraint("seats >= 0", name="seats_not_negative"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    plan_id: Mapped[str] = mapped_column(ID)
    seats: Mapped[int] = mapped_column(default=0)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class TaxRate(Base):
    """A tax of a region, in millionths, in force between two moments."""

    __tablename__ = "tax_rates"
    __table_args__ = (Index("ix_tax_rates_region", "region", "effective_from"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    region: Mapped[str] = mapped_column(String(20))  # "DE", "US-NY"
    name: Mapped[str] = mapped_column(NAME)  # "VAT"
    rate_ppm: Mapped[int]
    effective_from: Mapped[datetime] = mapped_column(UtcDateTime)
    effective_to: Mapped[datetime | None] = mapped_column(UtcDateTime)
