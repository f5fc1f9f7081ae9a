"""The double-entry ledger. Every transaction sums to zero per currency and is posted once per
reference. Transactions never change: a mistake is reversed by a new transaction.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from sqlalchemy import Table, bindparam, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from billing.ledger.tables import LedgerAccount, LedgerEntry, LedgerTransaction
from core import bulk_insert
from core.database import Units, WholeSum, insert_new
from core.errors import InsufficientQuota, InvariantBroken, NotFound
from core.ids import TRANSACTION, new_id
from core.money import Money

ACCOUNTS: Table = LedgerAccount.__table__  # type: ignore[assignment]
TRANSACTIONS: Table = LedgerTransaction.__table__  # type: ignore[assignment]
ENTRIES: Table = LedgerEntry.__table__  # type: ignore[assignment]
_RECORDED = "recorded_transactions"


class AccountKind(StrEnum):
    RECEIVABLE = "receivable"  # what the tenant owes us; debit balance
    PREPAID = "prepaid"  # what the tenant paid ahead; credit balance only
    PROMO = "promo"  # what we granted; credit balance only
    REVENUE = "revenue"
    DEFERRED = "deferred"  # fees billed ahead and not earned yet; credit balance
    TAX = "tax"
    ROUNDING = "rounding"
    CASH = "cash"
    PROMOTION = "promotion"  # cost of promotional credit
    BAD_DEBT = "bad_debt"


@dataclass(frozen=True, slots=True)
class Entry:
    account: AccountKind
    money: Money  # positive is a debit


@dataclass(frozen=True, slots=True)
class Transaction:
    tenant_id: str
    kind: str  # usage | topup | grant | credit | invoice | payment | refund | reversal …
    reference: str  # names the cause; each reference is posted once
    at: datetime
    entries: tuple[Entry, ...]
    memo: str = ""
    reverses_id: str | None = None
    id: str = field(default_factory=lambda: new_id(TRANSACTION))


def transfer(debit: AccountKind, credit: AccountKind, money: Money) -> tuple[Entry, Entry]:
    return Entry(debit, money), Entry(credit, -money)


def post(session: Session, transaction: Transaction) -> str:
    """Post unless the reference is already posted; returns the transaction's id."""
    known = session.scalar(
        select(LedgerTransaction.id).where(LedgerTransaction.reference == transaction.reference)
    )
    if known is not None:
        return known
    post_many(session, [transaction])
    return transaction.id


def post_many(session: Session, transactions: Sequence[Transaction]) -> None:
    """Post transactions with new references. InsufficientQuota if a wallet would be overdrawn."""
    if not transactions:
        return
    for transaction in transactions:
        _refuse_unbalanced(transaction)
    accounts = _accounts(session, transactions)
    bulk_insert.insert_all(
        session,
        TRANSACTIONS,
        ("id", "tenant_id", "kind", "reference", "at", "reverses_id", "memo"),
        [
            (t.id, t.tenant_id, t.kind, t.reference, t.at, t.reverses_id, t.memo)
            for t in transactions
        ],
    )
    changes: dict[int, int] = defaultdict(int)
    entries = []
    for t in transactions:
        for entry in t.entries:
            account_id = accounts[(t.tenant_id, entry.account, entry.money.currency)]
            changes[account_id] += entry.money.units
            entries.append((t.id, account_id, entry.money.units, entry.money.currency))
    columns = ("transaction_id", "account_id", "units", "currency")
    bulk_insert.insert_all(session, ENTRIES, columns, entries)
    _move_balances(session, changes)
    if _RECORDED in session.info:
        session.info[_RECORDED].extend(transactions)


@contextmanager
def recorded(session: Session) -> Iterator[list[Transaction]]:
    """Collects what is posted in this session, for previews whose transaction is rolled back."""
    posted: list[Transaction] = []
    session.info[_RECORDED] = posted
    try:
        yield posted
    finally:
        del session.info[_RECORDED]


def balance(session: Session, tenant_id: str, kind: AccountKind, currency: str) -> int:
    """Picounits, debits positive: a wallet with credit in it has a negative balance."""
    found = session.scalar(
        select(LedgerAccount.balance).where(
            LedgerAccount.tenant_id == tenant_id,
            LedgerAccount.kind == kind.value,
            LedgerAccount.currency == currency,
        )
    )
    return found or 0


def largest_balances(session: Session, tenant_ids: set[str]) -> dict[str, int]:
    """By tenant, the picounits of the account with the largest balance, without its sign."""
    rows = session.execute(
        select(LedgerAccount.tenant_id, func.max(func.abs(LedgerAccount.balance)))
        .where(LedgerAccount.tenant_id.in_(tenant_ids))
        .group_by(LedgerAccount.tenant_id)
    )
    return {tenant_id: int(units) for tenant_id, units in rows}


def posted_to(session: Session, reference: str, kind: AccountKind) -> int:
    """Picounits that the transaction with this reference posted to accounts of this kind."""
    found = session.scalar(
        select(func.coalesce(func.sum(LedgerEntry.units), 0))
        .join(LedgerAccount, LedgerAccount.id == LedgerEntry.account_id)
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(LedgerTransaction.reference == reference, LedgerAccount.kind == kind.value)
    )
    return int(found or 0)


def reverse(session: Session, transaction_id: str, at: datetime, memo: str) -> str:
    """Post the opposite entries, once per transaction."""
    original = session.get(LedgerTransaction, transaction_id)
    if original is None:
        raise NotFound(f"There is no ledger transaction {transaction_id!r}.")
    rows = session.execute(
        select(LedgerAccount.kind, LedgerEntry.units, LedgerEntry.currency)
        .join(LedgerAccount, LedgerAccount.id == LedgerEntry.account_id)
        .where(LedgerEntry.transaction_id == transaction_id)
    )
    entries = tuple(
        Entry(AccountKind(kind), Money(-units, currency)) for kind, units, currency in rows
    )
    return post(
        session,
        Transaction(
            original.tenant_id,
            "reversal",
            f"reverse:{transaction_id}",
            at,
            entries,
            memo,
            transaction_id,
        ),
    )


def _refuse_unbalanced(transaction: Transaction) -> None:
    sums: dict[str, int] = defaultdict(int)
    for entry in transaction.entries:
        sums[entry.money.currency] += entry.money.units
    wrong = {currency: units for currency, units in sums.items() if units}
    if wrong or not transaction.entries:
        raise InvariantBroken(
            f"Transaction {transaction.reference} does not sum to zero: {wrong or 'no entries'}.",
            next_step="Nothing was posted. This is a bug: report it.",
        )


def _accounts(
    session: Session, transactions: Sequence[Transaction]
) -> dict[tuple[str, AccountKind, str], int]:
    wanted = {
        (t.tenant_id, entry.account, entry.money.currency)
        for t in transactions
        for entry in t.entries
    }
    found = _known_accounts(session, {tenant_id for tenant_id, _, _ in wanted})
    missing = sorted(wanted - found.keys())
    if missing:
        rows = [
            {"tenant_id": tenant_id, "kind": kind.value, "currency": currency, "balance": 0}
            for tenant_id, kind, currency in missing
        ]
        insert_new(session, ACCOUNTS, rows, "tenant_id", "kind", "currency")
        found = _known_accounts(session, {tenant_id for tenant_id, _, _ in wanted})
    return found


def _known_accounts(
    session: Session, tenant_ids: set[str]
) -> dict[tuple[str, AccountKind, str], int]:
    rows = session.execute(
        select(
            LedgerAccount.tenant_id, LedgerAccount.kind, LedgerAccount.currency, LedgerAccount.id
        ).where(LedgerAccount.tenant_id.in_(tenant_ids))
    )
    return {
        (tenant, AccountKind(kind), currency): number for tenant, kind, currency, number in rows
    }


def _move_balances(session: Session, changes: dict[int, int]) -> None:
    moved = update(ACCOUNTS).where(ACCOUNTS.c.id == bindparam("number"))
    moved = moved.values(balance=WholeSum(ACCOUNTS.c.balance, bindparam("units", type_=Units)))
    # Always in the same order, to avoid deadlocks.
    rows = [{"number": key, "units": changes[key]} for key in sorted(changes) if changes[key]]
    if not rows:
        return
    try:
        session.connection().execute(moved, rows)
    except IntegrityError as error:
        raise InsufficientQuota(
            "The wallet balance is too low.", next_step="Top up the wallet and try again."
        ) from error
