"""Tables of sellers, plans, billing accounts, subscriptions and taxes."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Index,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID, NAME
from core import lengths
from core.database import Base, BigKey, Json, Units, UtcDateTime


class Seller(Base):
    """The issuer of invoices. Its locked row assigns gapless numbers."""

    __tablename__ = "sellers"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    address: Mapped[str] = mapped_column(Text, default="")
    tax_id: Mapped[str] = mapped_column(String(80), default="")
    tax_region: Mapped[str] = mapped_column(String(20), default="")  # "DE"
    bank_details: Mapped[str] = mapped_column(Text, default="")
    footer: Mapped[str] = mapped_column(Text, default="")  # below every invoice
    logo: Mapped[bytes | None] = mapped_column(LargeBinary)  # PNG or JPEG
    number_prefix: Mapped[str] = mapped_column(String(20), default="TH")
    next_number: Mapped[int] = mapped_column(BigInteger, default=1)
    next_credit_note: Mapped[int] = mapped_column(BigInteger, default=1)


class Plan(Base):
    """Fees and terms of a subscription, in one currency. Fees are per interval: a billing period, or a
    year from the start of the subscription; so is the commitment, unless it has an interval of its own.
    Included usage is per period."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    currency: Mapped[str] = mapped_column(CURRENCY)
    base_fee: Mapped[int] = mapped_column(Units, default=0)
    seat_fee: Mapped[int] = mapped_column(Units, default=0)
    included_seats: Mapped[int] = mapped_column(default=0)
    included_usage: Mapped[int] = mapped_column(Units, default=0)  # usage included per period
    minimum_commitment: Mapped[int] = mapped_column(Units, default=0)
    interval: Mapped[str] = mapped_column(String(10), default="month")  # month | year
    in_advance: Mapped[bool] = mapped_column(default=False)  # the fees; a commitment never is
    trial_days: Mapped[int] = mapped_column(default=0)  # of a tenant's first subscription
    grace_hours: Mapped[int] = mapped_column(
        default=24
    )  # time for late events before an invoice is final
    payment_terms_days: Mapped[int] = mapped_column(default=14)
    suspend_after_days: Mapped[int | None]  # days past due; None: never
    limits_plan: Mapped[str | None] = mapped_column(NAME)  # rate limits of its tenants
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    commitment_interval: Mapped[str | None] = mapped_column(String(10))  # None: that of the fees

    @property
    def committed_by(self) -> str:
        """The interval of the commitment."""
        return self.commitment_interval or self.interval


class BillingAccount(Base):
    """Billing data of a tenant. Locking this row serializes rating and closing of the tenant."""

    __tablename__ = "billing_accounts"
    __table_args__ = (
        CheckConstraint("anchor_day between 1 and 31", name="anchor_day"),
        Index("ix_billing_accounts_payment_reference", "payment_reference"),
    )

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    seller_id: Mapped[str] = mapped_column(ID)
    currency: Mapped[str] = mapped_column(CURRENCY)
    timezone: Mapped[str] = mapped_column(String(64), default="UTC")
    anchor_day: Mapped[int] = mapped_column(default=1)  # the last day of shorter months
    anchored_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # time of the last change
    legal_name: Mapped[str] = mapped_column(String(200), default="")
    address: Mapped[str] = mapped_column(Text, default="")
    email: Mapped[str] = mapped_column(String(320), default="")
    tax_id: Mapped[str] = mapped_column(String(80), default="")
    tax_region: Mapped[str] = mapped_column(String(20), default="")
    postal_code: Mapped[str] = mapped_column(String(20), default="")
    tax_exempt: Mapped[bool] = mapped_column(default=False)
    collection: Mapped[str] = mapped_column(
        String(20), default="manual"
    )  # manual | stripe | stripe_meters
    status: Mapped[str] = mapped_column(
        String(20), default="active"
    )  # active | past_due | suspended
    prepaid_only: Mapped[bool] = mapped_column(
        default=False
    )  # requests are rejected without credit
    payment_reference: Mapped[str | None] = mapped_column(String(25))  # ISO 11649, of every wire
    payment_terms_days: Mapped[int | None]  # agreed days to pay; None: the plan's
    payment_methods: Mapped[list[str] | None] = mapped_column(Json)  # None: as Stripe chooses
    limits_set: Mapped[str | None] = mapped_column(NAME)  # limits plan by the billing plan
    limits_before: Mapped[str | None] = mapped_column(NAME)  # the one that returns after it
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Subscription(Base):
    """A tenant's plan and seats over a time range. A change ends one row and starts another."""

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
    billed_from: Mapped[datetime | None] = mapped_column(UtcDateTime)  # end of a trial
    overrides: Mapped[dict[str, Any]] = mapped_column(
        Json, default=dict
    )  # amounts of this contract in place of the plan's, in picounits
    years_since: Mapped[datetime | None] = mapped_column(
        UtcDateTime
    )  # of the subscription that this one continues; None: `fees_from`

    @property
    def fees_from(self) -> datetime:
        return self.billed_from or self.starts_at

    @property
    def years_from(self) -> datetime:
        """Where the first contract year begins: a change of seats does not move it."""
        return self.years_since or self.fees_from


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
