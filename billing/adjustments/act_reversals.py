"""What undoing an act on money posts, by the kind of the act."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.adjustments import billing_details
from billing.adjustments.tables import MoneyAct
from billing.amounts import minor
from billing.invoicing import credit_notes, open_amounts, void_reversals
from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.payments import commands, settlement
from billing.payments.tables import Payment, Refund
from billing.payments.views import describe_refund
from core.errors import Conflict


@dataclass(frozen=True, slots=True)
class Undoing:
    act: MoneyAct  # that undoes
    original: MoneyAct
    at: datetime
    note: str


def post(session: Session, undoing: Undoing) -> dict[str, Any]:
    """Posts the opposite of the original and returns what to show of it."""
    return {"act": undoing.original.id} | _REVERSED[undoing.original.kind](session, undoing)


def refuse(act: MoneyAct) -> None:
    """Conflict, with the reason, for an act of a kind or state that is not undone."""
    if act.status == "posted" and act.kind in _REVERSED:
        return
    raise Conflict(
        f"The act is a {act.kind.replace('_', ' ')}, {act.status}; it cannot be undone.",
        next_step=_INSTEAD.get(act.kind, "Only a posted act can."),
    )


def can_be_undone(act: MoneyAct) -> bool:
    return act.status == "posted" and act.kind in _REVERSED


def settled_invoice(session: Session, invoice_id: str) -> dict[str, Any]:
    invoice = session.get_one(Invoice, invoice_id)
    still = minor(open_amounts.open_minor(invoice), invoice.currency)
    return {"invoice": invoice.label, "status": invoice.status, "open": still}


def _grant(session: Session, undoing: Undoing) -> dict[str, Any]:
    taken = credits.take_back(session, str(undoing.original.result["id"]), undoing.at, undoing.note)
    return {"grant": taken.id}


def _credit_note(session: Session, undoing: Undoing) -> dict[str, Any]:
    """By a note below zero."""
    issued = credit_notes.get(session, str(undoing.original.result["number"]))
    return {"number": credit_notes.cancel(session, issued, undoing.note, undoing.at).label}


def _write_off(session: Session, undoing: Undoing) -> dict[str, Any]:
    settlement.undo_write_off(session, undoing.original.target, undoing.at, undoing.note)
    return settled_invoice(session, undoing.original.target)


def _void(session: Session, undoing: Undoing) -> dict[str, Any]:
    void_reversals.undo_void(session, undoing.original.target, undoing.at, undoing.note)
    return settled_invoice(session, undoing.original.target)


def _wire(session: Session, undoing: Undoing) -> dict[str, Any]:
    """Goes back like a refund of all of it."""
    payment = session.get_one(Payment, str(undoing.original.result["payment"]))
    if payment.refunded_minor:
        raise Conflict(
            "A part of the wire is refunded already.",
            next_step="Undo that refund first, or refund what is left of the payment.",
        )
    reference = undoing.act.reference
    refund = commands.request_refund(
        session, payment.id, None, reference, undoing.at, reason=undoing.note
    )
    return describe_refund(refund)


def _refund(session: Session, undoing: Undoing) -> dict[str, Any]:
    """One that was booked by hand and whose money never left; a provider tells what became of its own."""
    refund = session.get_one(Refund, str(undoing.original.result["id"]))
    payment = session.get_one(Payment, refund.payment_id)
    if payment.provider != "manual" and payment.external_id is not None:
        raise Conflict(
            f"The payment provider {payment.provider} was asked to send this refund.",
            next_step="If the bank returns it, it is reversed by itself.",
        )
    settlement.refund_failed(session, refund, undoing.note, undoing.at)
    return describe_refund(refund)


def _details(session: Session, undoing: Undoing) -> dict[str, Any]:
    """Sets the tax details or the address to what they were."""
    changed = undoing.original.result
    return billing_details.change_back(session, undoing.original.tenant_id, changed, undoing.at)


_REVERSED: dict[str, Callable[[Session, Undoing], dict[str, Any]]] = {
    "grant": _grant,
    "wire": _wire,
    "credit_note": _credit_note,
    "write_off": _write_off,
    "void": _void,
    "refund": _refund,
    "tax": _details,
    "address": _details,
}
_INSTEAD = {
    "plan": "Change to the earlier plan: fees are prorated.",
    "add_on": "Set the earlier quantity: the fee is prorated.",
    "undo": "Ask for the act itself again.",
}
