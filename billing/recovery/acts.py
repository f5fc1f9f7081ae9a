"""What was done since a mark that the world outside knows of: read to be kept outside the database, and
read again from there after a restore. It has names and amounts, no secrets and no content.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger.tables import LedgerEntry, LedgerTransaction
from billing.payments.tables import Payment, PaymentCommand
from billing.recovery.places import Place
from billing.restores.tables import RestoreMark
from core.tenants.models import ApiKey, AuditEntry, Member, Operator

Row = dict[str, Any]
Acts = dict[str, list[Row]]
_PAID = ("payment", "grant", "refund")  # kinds of ledger transactions that move a customer's money
_INVOICE = ("id", "tenant_id", "seller_id", "number", "label", "currency", "due_minor")
_NOTE = ("id", "tenant_id", "seller_id", "number", "label", "currency", "net_minor", "tax_minor")
_COMMAND = ("provider", "tenant_id", "kind", "subject_id", "payload", "idempotency_key")
_PAYMENT = ("id", "tenant_id", "invoice_id", "provider", "external_id", "reference", "currency")


def read(session: Session, since: RestoreMark | None) -> Acts:
    """By kind; nothing without a mark before."""
    if since is None:
        return {}
    return {
        "invoices": _invoices(session, since),
        "credit_notes": _notes(session, since),
        "payments": _payments(session, since),
        "commands": _commands(session, since),
        "changes": _changes(session, since),
        "ended": _ended(session, since),
    }


def _numbered(table: type[Invoice] | type[CreditNote], since: RestoreMark, which: int) -> Any:
    """Rows with a number that was not given at the mark, of a seller of that time or of a new one."""
    later: list[ColumnElement[bool]] = [
        (table.seller_id == seller) & (table.number >= pair[which])
        for seller, pair in since.numbers.items()
    ]
    new = table.seller_id.not_in(list(since.numbers)) & table.number.is_not(None)
    return select(table).where(or_(*later, new)).order_by(table.seller_id, table.number)


def _invoices(session: Session, since: RestoreMark) -> list[Row]:
    return [
        _row(each, _INVOICE)
        | {
            "period_start": each.period_start.isoformat(),
            "final_at": each.final_at.isoformat() if each.final_at else None,
        }
        for each in session.scalars(_numbered(Invoice, since, 0))
    ]


def _notes(session: Session, since: RestoreMark) -> list[Row]:
    rows = session.execute(
        _numbered(CreditNote, since, 1)
        .add_columns(Invoice.label)
        .join(Invoice, Invoice.id == CreditNote.invoice_id)
    )
    return [_row(note, _NOTE) | {"invoice": invoice} for note, invoice in rows]


def _payments(session: Session, since: RestoreMark) -> list[Row]:
    """Payments that were posted, and credit without one."""
    moved = session.execute(
        select(LedgerTransaction)
        .where(
            LedgerTransaction.id.in_(
                select(LedgerEntry.transaction_id).where(LedgerEntry.id > since.entry_id)
            ),
            LedgerTransaction.kind.in_(_PAID),
        )
        .order_by(LedgerTransaction.id)
    ).scalars()
    found = []
    for each in moved:
        payment = session.get(Payment, each.reference.rpartition(":")[2])
        about = _row(payment, _PAYMENT) | {"amount_minor": payment.amount_minor} if payment else {}
        found.append({"posted": each.reference, "tenant_id": each.tenant_id} | about)
    return found


def _commands(session: Session, since: RestoreMark) -> list[Row]:
    rows = session.scalars(
        select(PaymentCommand)
        .where(PaymentCommand.id > since.command_id)
        .order_by(PaymentCommand.id)
    )
    return [_row(each, _COMMAND) | {"created_at": each.created_at.isoformat()} for each in rows]


def _audited(session: Session, since: RestoreMark) -> list[AuditEntry]:
    query = select(AuditEntry).where(AuditEntry.id > since.audit_id).order_by(AuditEntry.id)
    return list(session.scalars(query))


def _changes(session: Session, since: RestoreMark) -> list[Row]:
    """The audit log without the states before and after, which may have personal data."""
    return [
        _row(each, ("tenant_id", "actor", "action", "target")) | {"at": each.at.isoformat()}
        for each in _audited(session, since)
    ]


def _ended(session: Session, since: RestoreMark) -> list[Row]:
    """Keys, members and operators that ended or were changed, with their end."""
    named = {each.target for each in _audited(session, since)}
    found: list[Row] = []
    for table, kind, name, ends in (
        (ApiKey, "key", ApiKey.id, ("revoked_at", "expires_at")),
        (Member, "member", Member.id, ("disabled_at",)),
        (Operator, "operator", Operator.name, ("disabled_at",)),
    ):
        rows: Iterable[Any] = session.scalars(select(table).where(name.in_(named)).order_by(name))
        for each in rows:
            dates = {end: _text(getattr(each, end)) for end in ends if getattr(each, end)}
            if dates:
                found.append({"kind": kind, "id": getattr(each, name.key), **dates})
    return found


def _text(value: Any) -> str | None:
    return value.isoformat() if value is not None else None


def _row(of: Any, names: tuple[str, ...]) -> Row:
    return {name: getattr(of, name) for name in names}


@dataclass
class LostActs:
    """The acts of the marks that the database lost, each once, the last statement of it."""

    acts: dict[str, dict[str, Row]] = field(default_factory=dict)
    positions: set[int] = field(default_factory=set)

    def of(self, kind: str) -> list[Row]:
        return list(self.acts.get(kind, {}).values())

    def add(self, written: dict[str, Any]) -> None:
        self.positions.add(int(written["mark"]["position"]))
        for kind, rows in written.items():
            if kind != "mark":
                kept = self.acts.setdefault(kind, {})
                for row in rows:
                    kept[_key(kind, row)] = row


_KEYS = {
    "invoices": ("id",),
    "credit_notes": ("id",),
    "payments": ("posted",),
    "commands": ("idempotency_key",),
    "changes": ("tenant_id", "actor", "action", "target", "at"),
    "ended": ("kind", "id"),
}


def _key(kind: str, row: Row) -> str:
    return json.dumps([row[name] for name in _KEYS[kind]])


def file_name(position: int, token: str) -> str:
    """Sorted by position; two histories have different names."""
    return f"{position:012d}-{token[:8]}.json"


def read_lost(places: Iterable[Place], folder: str, own: set[str], first: int) -> LostActs:
    """From all places: the acts of marks from a position on that are not the database's `own`, which are
    names of files."""
    found = LostActs()
    seen: dict[str, bytes] = {}
    for place in places:
        for path in place.names(folder):
            name = path.rpartition("/")[2]
            number = name.partition("-")[0]
            if (
                number.isascii()
                and number.isdecimal()
                and int(number) >= first
                and name not in own | seen.keys()
            ):
                seen[name] = place.read(path) or b""
    for name in sorted(seen):
        if seen[name]:
            found.add(json.loads(seen[name]))
    return found
