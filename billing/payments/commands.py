"""Plans the commands to a provider from the stored invoices and payments, and queues each in the
outbox once, under an idempotency key derived from its cause. Planning can be repeated at any time.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, exists, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.invoicing.invoices import FINAL, PAID, UNCOLLECTIBLE, VOID
from billing.invoicing.tables import CreditNote, Invoice
from billing.payments import settlement
from billing.payments.tables import Dispute, Payment, PaymentCommand, Refund
from core.database import insert_new
from core.errors import Conflict, NotFound

INVOICE, COLLECT, LOWER, CLOSE = "invoice", "collect", "lower", "close"
CHARGE, REFUND, USAGE = "charge", "refund", "usage"
_Row = dict[str, Any]


def put(session: Session, command: _Row) -> int:
    """Queue a command, once per key; returns the number of new ones."""
    return put_all(session, [command])


def put_all(session: Session, rows: list[_Row]) -> int:
    return insert_new(session, PaymentCommand.__table__, rows, "idempotency_key")  # type: ignore[arg-type]


def row(
    provider: str,
    tenant_id: str,
    *,
    kind: str,
    subject_id: str,
    key: str,
    at: datetime,
    payload: dict[str, Any] | None = None,
) -> _Row:
    return {
        "provider": provider,
        "tenant_id": tenant_id,
        "kind": kind,
        "subject_id": subject_id,
        "payload": payload or {},
        "progress": {},
        "idempotency_key": key[:160],
        "created_at": at,
        "next_at": at,
        "attempts": 0,
        "failed": False,
    }


def ways_of(provider: str) -> list[str]:
    """The values of `collection` with which the provider collects invoices. What it meters is on none."""
    return [provider, f"{provider}_meters"]


def first_collection(invoice_id: str) -> str:
    """Its idempotency key."""
    return f"{COLLECT}:{invoice_id}:0"


def plan(session: Session, provider: str, at: datetime) -> int:
    """Queue missing commands; returns the number of new ones."""
    found = 0
    for rows in (_invoices, _credits, _paid_elsewhere, _closed_here):
        found += put_all(session, rows(session, provider, at))
    # Collect last: the provider's open amount is right only after all other commands are done.
    return found + put_all(session, _collections(session, provider, at))


def collect_again(
    session: Session, provider: str, invoice: Invoice, turn: str, at: datetime
) -> int:
    """Queue another collection attempt, once per turn. It waits for earlier commands."""
    key = f"{COLLECT}:{invoice.id}:{turn}"
    return put(
        session,
        row(provider, invoice.tenant_id, kind=COLLECT, subject_id=invoice.id, key=key, at=at),
    )


def charge(session: Session, payment: Payment, at: datetime) -> int:
    """Collect a pending top-up."""
    key = f"{CHARGE}:{payment.id}"
    return put(
        session,
        row(
            payment.provider, payment.tenant_id, kind=CHARGE, subject_id=payment.id, key=key, at=at
        ),
    )


def request_refund(
    session: Session,
    payment_id: str,
    amount_minor: int | None,
    reference: str,
    at: datetime,
    *,
    reason: str = "",
) -> Refund:
    """Post a refund, once per reference, and queue it at the provider unless the payment is manual.
    `amount_minor=None` refunds all that is left.
    """
    payment = session.get(Payment, payment_id)
    if payment is None:
        raise NotFound(
            f"There is no payment {payment_id!r}.",
            next_step="List payments with: tollhouse payment list",
        )
    lock_account(session, payment.tenant_id)
    session.refresh(payment)
    disputed = select(Dispute.id).where(
        Dispute.payment_id == payment.id, Dispute.withdrawn.is_(True)
    )
    if session.scalar(disputed) is not None:
        raise Conflict(
            f"Payment {payment.id} is disputed: the bank has withdrawn its money.",
            next_step="Accept the dispute at the provider, or wait for the decision.",
        )
    by_hand = payment.provider == "manual" or payment.external_id is None
    left = payment.amount_minor - payment.refunded_minor
    made = settlement.refund(
        session,
        payment,
        left if amount_minor is None else amount_minor,
        reference,
        at,
        reason=reason,
        status=settlement.SUCCEEDED if by_hand else settlement.PENDING,
    )
    if not by_hand and made.status == settlement.PENDING:
        key = f"{REFUND}:{made.id}"
        put(
            session,
            row(
                payment.provider, payment.tenant_id, kind=REFUND, subject_id=made.id, key=key, at=at
            ),
        )
    return made


def _queued(key: Any) -> ColumnElement[bool]:
    return exists(select(PaymentCommand.id).where(PaymentCommand.idempotency_key == key))


# Built once: these queries run every few seconds and mostly find nothing.
_UNSENT_INVOICES = (
    select(Invoice.id, Invoice.tenant_id)
    .join(BillingAccount, BillingAccount.tenant_id == Invoice.tenant_id)
    .where(
        BillingAccount.collection.in_(bindparam("ways", expanding=True)),
        Invoice.metered.is_(False),
        Invoice.status == FINAL,
        Invoice.external_id.is_(None),
        Invoice.due_minor > 0,
        ~_queued(f"{INVOICE}:" + Invoice.id),
    )
    .order_by(Invoice.tenant_id, Invoice.number)
)
# Sent to the provider, even if the account's collection method has changed since.
_AT_PROVIDER = and_(Invoice.external_id.is_not(None), _queued(f"{INVOICE}:" + Invoice.id))
_UNSENT_CREDITS = (
    select(CreditNote)
    .join(Invoice, Invoice.id == CreditNote.invoice_id)
    .where(_AT_PROVIDER, ~_queued(f"{LOWER}:" + CreditNote.id))
    .order_by(CreditNote.number)
)
_UNSENT_PAYMENTS = (
    select(Payment, Invoice.status)
    .join(Invoice, Invoice.id == Payment.invoice_id)
    .where(
        _AT_PROVIDER,
        Payment.provider != bindparam("provider"),
        Payment.status == settlement.SUCCEEDED,
        ~_queued(f"{LOWER}:" + Payment.id),
        ~_queued(f"{CLOSE}:" + Payment.id),
    )
    .order_by(Payment.created_at, Payment.id)
)
_UNSENT_CLOSED = (
    select(Invoice.id, Invoice.tenant_id, Invoice.status)
    .where(
        _AT_PROVIDER,
        Invoice.status.in_((VOID, UNCOLLECTIBLE)),
        ~_queued(f"{CLOSE}:" + Invoice.id + ":" + Invoice.status),
    )
    .order_by(Invoice.id)
)
_WAITING = select(PaymentCommand.id).where(
    PaymentCommand.subject_id == Invoice.id,
    PaymentCommand.kind.in_((INVOICE, LOWER, CLOSE)),
    PaymentCommand.done_at.is_(None),
)
_UNCOLLECTED = (
    select(Invoice.id, Invoice.tenant_id)
    .where(
        _AT_PROVIDER,
        Invoice.status == FINAL,
        ~exists(_WAITING),
        ~_queued(f"{COLLECT}:" + Invoice.id + ":0"),
    )
    .order_by(Invoice.id)
)


def _invoices(session: Session, provider: str, at: datetime) -> list[_Row]:
    """Final invoices that are not at the provider."""
    rows = session.execute(_UNSENT_INVOICES, {"ways": ways_of(provider)})
    return [
        row(provider, who, kind=INVOICE, subject_id=each, key=f"{INVOICE}:{each}", at=at)
        for each, who in rows
    ]


def _credits(session: Session, provider: str, at: datetime) -> list[_Row]:
    """Credit notes on invoices at the provider."""
    notes = session.scalars(_UNSENT_CREDITS)
    return [
        row(
            provider,
            note.tenant_id,
            kind=LOWER,
            subject_id=note.invoice_id,
            key=f"{LOWER}:{note.id}",
            at=at,
            payload={
                "amount_minor": note.net_minor + note.tax_minor,
                "reason": f"{note.label}: {note.reason}",
            },
        )
        for note in notes
    ]


def _paid_elsewhere(session: Session, provider: str, at: datetime) -> list[_Row]:
    """Payments received outside the provider for invoices that are there."""
    found = session.execute(_UNSENT_PAYMENTS, {"provider": provider})
    rows = []
    for payment, status in found:
        assert payment.invoice_id is not None
        kind = CLOSE if status == PAID else LOWER
        what: dict[str, Any] = {"how": "paid_elsewhere"}
        if kind == LOWER:
            what = {"amount_minor": payment.amount_minor, "reason": "Paid by other means"}
        key = f"{kind}:{payment.id}"
        rows.append(
            row(
                provider,
                payment.tenant_id,
                kind=kind,
                subject_id=payment.invoice_id,
                key=key,
                at=at,
                payload=what,
            )
        )
    return rows


def _closed_here(session: Session, provider: str, at: datetime) -> list[_Row]:
    """Invoices voided or written off here."""
    found = session.execute(_UNSENT_CLOSED)
    return [
        row(
            provider,
            who,
            kind=CLOSE,
            subject_id=each,
            key=f"{CLOSE}:{each}:{status}",
            at=at,
            payload={"how": status},
        )
        for each, who, status in found
    ]


def _collections(session: Session, provider: str, at: datetime) -> list[_Row]:
    """The first collection attempt of each invoice that has no waiting command."""
    rows = session.execute(_UNCOLLECTED)
    return [
        row(provider, who, kind=COLLECT, subject_id=each, key=first_collection(each), at=at)
        for each, who in rows
    ]
