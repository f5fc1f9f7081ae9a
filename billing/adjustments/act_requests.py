"""What is asked for when a person acts on money: the kind of act, what it concerns, and its terms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from core.clock import usual
from core.errors import BadRequest
from core.money import decimal_of, units_of


class Kind(StrEnum):
    GRANT = "grant"
    CREDIT_NOTE = "credit_note"
    REFUND = "refund"
    VOID = "void"
    WRITE_OFF = "write_off"
    WIRE = "wire"
    PLAN = "plan"
    ADD_ON = "add_on"
    TAX = "tax"
    ADDRESS = "address"
    UNDO = "undo"


FEES = (Kind.PLAN, Kind.ADD_ON)  # they change what the next invoices bill
DETAILS = (Kind.TAX, Kind.ADDRESS)  # they change what stands on the next invoices, and their tax
# Names in the audit log.
ACTIONS = {
    Kind.GRANT: "credit.grant",
    Kind.CREDIT_NOTE: "credit_note.issue",
    Kind.REFUND: "payment.refund",
    Kind.VOID: "invoice.void",
    Kind.WRITE_OFF: "invoice.write_off",
    Kind.WIRE: "payment.wire",
    Kind.PLAN: "subscription.change",
    Kind.ADD_ON: "add_on.set",
    Kind.TAX: "billing.change",
    Kind.ADDRESS: "billing.change",
    Kind.UNDO: "money_act.undo",
}


@dataclass(frozen=True, slots=True)
class ActRequest:
    """`target` is a tenant for grant, plan, add-on, tax and address, a payment for refund, an act for
    undo, else an invoice; a wire without an invoice names a tenant. `amount` is in picounits; None is all
    that is open."""

    kind: Kind
    target: str
    reference: str  # the same one is posted once
    amount: int | None = None
    reason: str = ""
    terms: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    tenant_id: str
    target: str  # its id
    currency: str
    amount: int


def checked_terms(request: ActRequest) -> dict[str, Any]:
    """The terms of the kind, in the types that they are stored in. BadRequest names what is wrong."""
    known, given = _TERMS[request.kind], request.terms or {}
    for name in given:
        if name not in known:
            raise BadRequest(
                f"{request.kind} has no term {str(name)[:40]!r}.",
                next_step=f"Its terms: {', '.join(known) or 'none'}.",
                param="terms",
            )
    try:
        return {name: known[name](value) for name, value in given.items() if value is not None}
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"A term of {request.kind} is wrong: {error}.",
            next_step="Write amounts as 12.50, times in ISO 8601 with a time zone.",
            param="terms",
        ) from None


def _moment(value: Any) -> str:
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None:
        raise ValueError(f"{value} has no time zone")
    return usual(moment).isoformat()


def _yes(value: Any) -> bool:
    return value in (True, "true", "yes")


def _amounts(value: Any) -> dict[str, str]:
    return {str(name): decimal_of(units_of(amount)) for name, amount in dict(value).items()}


_TERMS: dict[Kind, dict[str, Callable[[Any], Any]]] = {
    Kind.GRANT: {"kind": str, "expires_at": _moment, "priority": int},
    Kind.CREDIT_NOTE: {"refund": _yes},
    Kind.REFUND: {},
    Kind.VOID: {},
    Kind.WRITE_OFF: {},
    Kind.WIRE: {},
    Kind.PLAN: {"plan": str, "seats": int, "overrides": _amounts},
    Kind.ADD_ON: {"add_on": str, "quantity": int},
    Kind.TAX: {"tax_region": str, "tax_id": str, "postal_code": str, "tax_exempt": _yes},
    Kind.ADDRESS: {"legal_name": str, "address": str, "email": str},
    Kind.UNDO: {},
}
