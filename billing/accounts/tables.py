"""Tables of sellers, billing accounts and billing periods."""

from datetime import datetime

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

from billing.columns import CURRENCY, ID, NAME
from billing.periods import Span
from core.database import Base, Json, UtcDateTime


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


class BillingPeriod(Base):
    """A billing period of a tenant. Charges after it is closed go to the next open period."""

    __tablename__ = "billing_periods"
    __table_args__ = (
        UniqueConstraint("tenant_id", "starts_at"),
        CheckConstraint("ends_at > starts_at", name="ends_after_start"),
        Index("ix_billing_periods_open", "closed_at", "ends_at"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime] = mapped_column(UtcDateTime)
    closed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # The whole month of which a change of the anchor day or the time zone leaves a part; None: all.
    whole_from: Mapped[datetime | None] = mapped_column(UtcDateTime)
    whole_to: Mapped[datetime | None] = mapped_column(UtcDateTime)

    @property
    def span(self) -> Span:
        bounds = self.starts_at, self.ends_at
        return Span(*bounds, self.whole_from or bounds[0], self.whole_to or bounds[1])
