"""Tables of invoices, their lines, credit notes, and of what children's invoices pass on."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Index,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID, NAME
from core.database import Base, BigKey, Json, Units, UtcDateTime

DRAFT, FINAL, PAID, VOID, UNCOLLECTIBLE = "draft", "final", "paid", "void", "uncollectible"


class Invoice(Base):
    """draft -> final -> paid | void | uncollectible. A final invoice's amounts never change."""

    __tablename__ = "invoices"
    __table_args__ = (
        UniqueConstraint("seller_id", "number"),
        UniqueConstraint("period_id"),
        Index("ix_invoices_tenant", "tenant_id", "period_start"),
        Index("ix_invoices_status", "status", "due_at"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    seller_id: Mapped[str] = mapped_column(ID)
    period_id: Mapped[str] = mapped_column(ID)
    number: Mapped[int | None] = mapped_column(BigInteger)  # assigned when it becomes final
    label: Mapped[str | None] = mapped_column(String(40))  # "TH-000042"
    status: Mapped[str] = mapped_column(String(20))
    currency: Mapped[str] = mapped_column(CURRENCY)
    period_start: Mapped[datetime] = mapped_column(UtcDateTime)
    period_end: Mapped[datetime] = mapped_column(UtcDateTime)
    timezone: Mapped[str] = mapped_column(String(64))
    billed_to: Mapped[dict[str, Any]] = mapped_column(
        Json, default=dict
    )  # as of when it became final
    issued_by: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)  # the same of the seller
    subtotal_minor: Mapped[int] = mapped_column(BigInteger, default=0)
    promo_minor: Mapped[int] = mapped_column(
        BigInteger, default=0
    )  # promotional credit used; < 0: returned
    tax_minor: Mapped[int] = mapped_column(BigInteger, default=0)
    total_minor: Mapped[int] = mapped_column(BigInteger, default=0)
    prepaid_minor: Mapped[int] = mapped_column(BigInteger, default=0)  # paid from the wallet
    due_minor: Mapped[int] = mapped_column(
        BigInteger, default=0
    )  # as of when it became final; excludes later payments
    paid_minor: Mapped[int] = mapped_column(BigInteger, default=0)
    credited_minor: Mapped[int] = mapped_column(BigInteger, default=0)  # by credit notes
    exact: Mapped[int] = mapped_column(Units, default=0)  # sum of the lines, unrounded
    drafted_at: Mapped[datetime] = mapped_column(UtcDateTime)
    final_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    due_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    settled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    external_id: Mapped[str | None] = mapped_column(String(120))  # at the payment provider
    pay_page: Mapped[str] = mapped_column(Text, default="")  # the provider's payment page
    # Over usage that Stripe bills: for comparison, never collected.
    metered: Mapped[bool] = mapped_column(default=False, server_default=false())


class InvoiceLine(Base):
    """`exact` picounits, rounded once to `amount_minor`."""

    __tablename__ = "invoice_lines"
    __table_args__ = (UniqueConstraint("invoice_id", "position"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    invoice_id: Mapped[str] = mapped_column(ID, ForeignKey("invoices.id"))
    position: Mapped[int]
    # usage | late_usage | adjustment | base_fee | seats | add_on | included | commitment | promo | tax
    # | markup | transfer | child | child_markup | metered
    kind: Mapped[str] = mapped_column(String(20))
    component: Mapped[str] = mapped_column(String(20), default="")
    description: Mapped[str] = mapped_column(Text)
    project_id: Mapped[str] = mapped_column(ID, default="")
    model: Mapped[str] = mapped_column(NAME, default="")
    adapter: Mapped[str] = mapped_column(NAME, default="")
    price_version: Mapped[str] = mapped_column(ID, default="")
    usage_period_id: Mapped[str] = mapped_column(ID, default="")
    quantity: Mapped[int] = mapped_column(BigInteger, default=0)
    unit: Mapped[str] = mapped_column(String(20), default="")
    exact: Mapped[int] = mapped_column(Units)
    amount_minor: Mapped[int] = mapped_column(BigInteger)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime] = mapped_column(UtcDateTime)
    details: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)


class CreditNote(Base):
    """Reverses part or all of a final invoice, with a number of its own. Append-only."""

    __tablename__ = "credit_notes"
    __table_args__ = (UniqueConstraint("seller_id", "number"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    invoice_id: Mapped[str] = mapped_column(ID, ForeignKey("invoices.id"))
    tenant_id: Mapped[str] = mapped_column(ID)
    seller_id: Mapped[str] = mapped_column(ID)
    number: Mapped[int] = mapped_column(BigInteger)
    label: Mapped[str] = mapped_column(String(40))
    currency: Mapped[str] = mapped_column(CURRENCY)
    net_minor: Mapped[int] = mapped_column(BigInteger)
    tax_minor: Mapped[int] = mapped_column(BigInteger)
    outcome: Mapped[str] = mapped_column(String(20))  # due | balance | refund | cancels
    reason: Mapped[str] = mapped_column(Text)
    reference: Mapped[str] = mapped_column(String(160), unique=True)
    transaction_id: Mapped[str] = mapped_column(ID)
    issued_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ChildInvoice(Base):
    """What an invoice of a child passes on to its parent's: its charges if the parent pays, or else the
    mark-up, which the parent earns as the child pays. Of the mark-up, `markup_promo_minor` is what the
    child's promotional credit paid, and passes on as such credit."""

    __tablename__ = "child_invoices"
    __table_args__ = (Index("ix_child_invoices_parent", "parent_id", "billed_by"),)

    invoice_id: Mapped[str] = mapped_column(ID, primary_key=True)  # the child's
    parent_id: Mapped[str] = mapped_column(ID)
    child_id: Mapped[str] = mapped_column(ID)
    pays: Mapped[str] = mapped_column(String(10))
    period_start: Mapped[datetime] = mapped_column(UtcDateTime)
    period_end: Mapped[datetime] = mapped_column(UtcDateTime)
    charged_minor: Mapped[int] = mapped_column(BigInteger)  # of the child before tax, no mark-up
    markup_minor: Mapped[int] = mapped_column(BigInteger)
    billed_by: Mapped[str | None] = mapped_column(ID)  # the parent's final invoice, if it pays
    markup_promo_minor: Mapped[int] = mapped_column(BigInteger, server_default="0")
    passed_minor: Mapped[int] = mapped_column(
        BigInteger, server_default="0"
    )  # earned, and on invoices
    promo_passed_minor: Mapped[int] = mapped_column(BigInteger, server_default="0")


class MeteredSpan(Base):
    """Whole hours whose usage Stripe meters and bills; a running span has no end."""

    __tablename__ = "metered_spans"

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    ends_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


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
