"""Tables of the ledger and of credit."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID
from core.database import Base, BigKey, Units, UtcDateTime

_VOIDS = text("kind = 'void'")


class LedgerAccount(Base):
    """Debits are positive. `balance` is the sum of the entries, stored for the check constraint."""

    __tablename__ = "ledger_accounts"
    __table_args__ = (
        UniqueConstraint("tenant_id", "kind", "currency"),
        # A wallet is a liability: its balance is never a debit.
        CheckConstraint("kind not in ('prepaid', 'promo') or balance <= 0", name="wallet"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    kind: Mapped[str] = mapped_column(String(20))
    currency: Mapped[str] = mapped_column(CURRENCY)
    balance: Mapped[int] = mapped_column(Units, default=0)


class LedgerTransaction(Base):
    """Append-only. `reference` names the cause and is unique, so each cause is posted once."""

    __tablename__ = "ledger_transactions"
    __table_args__ = (
        Index("ix_ledger_transactions_tenant_at", "tenant_id", "at"),
        Index("ix_ledger_transactions_voids", "at", postgresql_where=_VOIDS, sqlite_where=_VOIDS),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    kind: Mapped[str] = mapped_column(String(20))
    reference: Mapped[str] = mapped_column(String(160), unique=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    reverses_id: Mapped[str | None] = mapped_column(ID)
    memo: Mapped[str] = mapped_column(Text, default="")


class LedgerEntry(Base):
    """Append-only. Debits are positive; a transaction's entries sum to zero per currency."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        Index("ix_ledger_entries_transaction", "transaction_id"),
        Index("ix_ledger_entries_account", "account_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    transaction_id: Mapped[str] = mapped_column(ID, ForeignKey("ledger_transactions.id"))
    account_id: Mapped[int] = mapped_column(BigKey, ForeignKey("ledger_accounts.id"))
    units: Mapped[int] = mapped_column(Units)
    currency: Mapped[str] = mapped_column(CURRENCY)


class CreditGrant(Base):
    """Credit of a tenant: bought (prepaid) or granted (promo)."""

    __tablename__ = "credit_grants"
    __table_args__ = (
        CheckConstraint("remaining >= 0 and remaining <= granted", name="remaining_in_range"),
        Index("ix_credit_grants_tenant", "tenant_id", "kind"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    kind: Mapped[str] = mapped_column(String(20))  # prepaid | promo
    currency: Mapped[str] = mapped_column(CURRENCY)
    granted: Mapped[int] = mapped_column(Units)
    remaining: Mapped[int] = mapped_column(Units)
    priority: Mapped[int] = mapped_column(default=100)  # lowest first
    granted_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    expired_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    reference: Mapped[str] = mapped_column(String(160), unique=True)  # the cause: payment, campaign
    note: Mapped[str] = mapped_column(Text, default="")


class CreditUse(Base):
    """Credit drawn from a grant: used for a period, expired, refunded or disputed. Append-only."""

    __tablename__ = "credit_uses"
    __table_args__ = (Index("ix_credit_uses_period", "bill_period_id"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    grant_id: Mapped[str] = mapped_column(ID, ForeignKey("credit_grants.id"))
    tenant_id: Mapped[str] = mapped_column(ID)
    kind: Mapped[str] = mapped_column(String(20))  # prepaid | promo
    purpose: Mapped[str] = mapped_column(String(20))  # usage | expiry | refund | dispute | undo
    units: Mapped[int] = mapped_column(Units)
    bill_period_id: Mapped[str | None] = mapped_column(ID)
    transaction_id: Mapped[str] = mapped_column(ID)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
