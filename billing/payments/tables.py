"""Tables of customers, methods, payments, refunds, disputes, dunning, commands and top-ups."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID, NAME
from core.database import Base, BigKey, Json, Units, UtcDateTime

EXTERNAL = String(120)


class PaymentCustomer(Base):
    __tablename__ = "payment_customers"
    __table_args__ = (UniqueConstraint("provider", "external_id"),)

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    provider: Mapped[str] = mapped_column(String(20), primary_key=True)
    external_id: Mapped[str] = mapped_column(EXTERNAL)
    default_method: Mapped[str | None] = mapped_column(EXTERNAL)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class PaymentMethod(Base):
    """A payment method at the provider, with a display label only, never a card number."""

    __tablename__ = "payment_methods"
    __table_args__ = (UniqueConstraint("provider", "external_id"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    provider: Mapped[str] = mapped_column(String(20))
    external_id: Mapped[str] = mapped_column(EXTERNAL)
    label: Mapped[str] = mapped_column(NAME, default="")  # "Visa 4242"
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    detached_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Payment(Base):
    """A payment for an invoice or a wallet top-up."""

    __tablename__ = "payments"
    __table_args__ = (
        UniqueConstraint("provider", "external_id"),
        CheckConstraint("amount_minor > 0", name="amount_positive"),
        Index("ix_payments_invoice", "invoice_id"),
        Index("ix_payments_tenant", "tenant_id", "created_at"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    invoice_id: Mapped[str | None] = mapped_column(ID)  # None is a top-up
    provider: Mapped[str] = mapped_column(String(20))  # manual | fake | stripe
    external_id: Mapped[str | None] = mapped_column(EXTERNAL)
    reference: Mapped[str] = mapped_column(String(160), unique=True)  # idempotency key
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount_minor: Mapped[int] = mapped_column(BigInteger)
    refunded_minor: Mapped[int] = mapped_column(BigInteger, default=0)
    status: Mapped[str] = mapped_column(String(20))  # pending | succeeded | failed
    failure: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    settled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Refund(Base):
    __tablename__ = "refunds"
    __table_args__ = (UniqueConstraint("provider", "external_id"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    payment_id: Mapped[str] = mapped_column(ID, index=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    provider: Mapped[str] = mapped_column(String(20))
    external_id: Mapped[str | None] = mapped_column(EXTERNAL)
    reference: Mapped[str] = mapped_column(String(160), unique=True)
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount_minor: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Dispute(Base):
    __tablename__ = "disputes"
    __table_args__ = (UniqueConstraint("provider", "external_id"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    payment_id: Mapped[str | None] = mapped_column(ID)
    tenant_id: Mapped[str | None] = mapped_column(ID)
    provider: Mapped[str] = mapped_column(String(20))
    external_id: Mapped[str] = mapped_column(EXTERNAL)
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount_minor: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(
        String(40)
    )  # open | won | lost, or the provider's own status
    opened_at: Mapped[datetime] = mapped_column(UtcDateTime)
    withdrawn: Mapped[bool] = mapped_column(default=False)  # the withdrawal is posted
    closed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class PaymentCommand(Base):
    """Outbox: a command to the provider with its idempotency key, retried until done."""

    __tablename__ = "payment_outbox"
    __table_args__ = (Index("ix_payment_outbox_due", "done_at", "next_at"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    provider: Mapped[str] = mapped_column(String(20))
    tenant_id: Mapped[str | None] = mapped_column(ID)
    kind: Mapped[str] = mapped_column(
        String(40)
    )  # invoice | collect | lower | close | charge | refund | usage
    subject_id: Mapped[str] = mapped_column(String(120))
    payload: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    progress: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)  # completed steps
    idempotency_key: Mapped[str] = mapped_column(String(160), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    next_at: Mapped[datetime] = mapped_column(UtcDateTime)
    attempts: Mapped[int] = mapped_column(default=0)
    done_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    failed: Mapped[bool] = mapped_column(default=False)
    last_error: Mapped[str | None] = mapped_column(Text)


class PaymentWebhook(Base):
    """Inbox: a verified event of the provider, stored once and applied later."""

    __tablename__ = "payment_inbox"
    __table_args__ = (
        Index("ix_payment_inbox_open", "done_at", "next_at"),
        Index("ix_payment_inbox_subject", "provider", "kind", "subject_id"),
    )

    provider: Mapped[str] = mapped_column(String(20), primary_key=True)
    external_id: Mapped[str] = mapped_column(EXTERNAL, primary_key=True)
    type: Mapped[str] = mapped_column(String(80))
    kind: Mapped[str] = mapped_column(String(20))  # invoice | payment | refund | dispute …
    subject_id: Mapped[str] = mapped_column(EXTERNAL)  # the object that the event concerns
    payload: Mapped[dict[str, Any]] = mapped_column(Json)
    occurred_at: Mapped[datetime] = mapped_column(UtcDateTime)
    received_at: Mapped[datetime] = mapped_column(UtcDateTime)
    next_at: Mapped[datetime] = mapped_column(UtcDateTime)
    attempts: Mapped[int] = mapped_column(default=0)
    done_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_error: Mapped[str | None] = mapped_column(Text)
    parked: Mapped[str | None] = mapped_column(Text)  # reason why it cannot be applied


class DunningCase(Base):
    """Dunning of an overdue invoice: the last step and the time of the next."""

    __tablename__ = "dunning_cases"
    __table_args__ = (Index("ix_dunning_cases_next", "closed_at", "next_at"),)

    invoice_id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    step: Mapped[int] = mapped_column(default=0)
    opened_at: Mapped[datetime] = mapped_column(UtcDateTime)
    next_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    suspended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    closed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    outcome: Mapped[str | None] = mapped_column(String(40))  # paid | written_off | voided


class TopUp(Base):
    """Automatic top-up: below the threshold, charge the amount to the payment method."""

    __tablename__ = "top_ups"

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    threshold: Mapped[int] = mapped_column(Units)
    amount: Mapped[int] = mapped_column(Units)
    currency: Mapped[str] = mapped_column(CURRENCY)
    enabled: Mapped[bool] = mapped_column(default=True)
    pending_reference: Mapped[str | None] = mapped_column(String(160))
    last_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_error: Mapped[str | None] = mapped_column(NAME)
