"""Tables of plans, subscriptions and add-ons."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID, NAME
from core.database import Base, BigKey, Json, Units, UtcDateTime


class AddOn(Base):
    """A fee per unit and interval, added to plans of the same interval. It never changes."""

    __tablename__ = "add_ons"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    currency: Mapped[str] = mapped_column(CURRENCY)
    fee: Mapped[int] = mapped_column(Units)  # picounits per unit and interval
    interval: Mapped[str] = mapped_column(String(10))  # month | year
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AddOnHolding(Base):
    """A tenant's quantity of an add-on over a time range. A change ends one row and starts another."""

    __tablename__ = "add_on_holdings"
    __table_args__ = (
        CheckConstraint("quantity > 0", name="quantity_positive"),
        Index("ix_add_on_holdings_tenant", "tenant_id", "starts_at"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    add_on_id: Mapped[str] = mapped_column(ID)
    quantity: Mapped[int]
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


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
