"""Tables of organisations above organisations, and of what children's invoices pass on."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import ID
from core.database import Base, UtcDateTime


class OrganisationLink(Base):
    """The parent of a tenant, which sees its usage, and who pays for it."""

    __tablename__ = "organisation_links"
    __table_args__ = (
        CheckConstraint("tenant_id <> parent_id", name="not_its_own_parent"),
        Index("ix_organisation_links_parent", "parent_id"),
    )

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    parent_id: Mapped[str] = mapped_column(ID)
    pays: Mapped[str] = mapped_column(String(10))  # parent | self
    markup_ppm: Mapped[int] = mapped_column(BigInteger, default=0)  # on the child's charges
    since: Mapped[datetime] = mapped_column(UtcDateTime)  # the parent sees usage from this day on
    changed_by: Mapped[str] = mapped_column(ID)


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
