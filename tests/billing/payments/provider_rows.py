"""Rows of payments as a test says them, and what the ledger differs in from a provider's records."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.differences import Difference
from billing.invoicing.tables import Invoice
from billing.payments import compare
from billing.payments.base import InvoiceState
from billing.payments.compare import ProviderDifference
from billing.payments.provider_snapshot import ProviderSnapshot
from billing.payments.tables import Dispute, Payment, PaymentCommand, PaymentWebhook, Refund
from tests.billing.conftest import START

CENT = 10**10  # picounits


def command_row(session: Session, subject: str, kind: str = "invoice", **fields: Any) -> None:
    given = {"provider": "stripe", "tenant_id": "acme", "done_at": START, **fields}
    key = given.pop("key", f"{given['provider']}:{kind}:{subject}")
    made = PaymentCommand(
        kind=kind, subject_id=subject, idempotency_key=key, created_at=START, next_at=START, **given
    )
    session.add(made)
    session.flush()


def event_row(session: Session, subject: str, **fields: Any) -> None:
    given = {"provider": "stripe", "type": "x", "kind": "invoice", "payload": {}, **fields}
    times = {"occurred_at": START, "received_at": START, "next_at": START}
    session.add(PaymentWebhook(external_id=f"evt_{subject}", subject_id=subject, **given, **times))
    session.flush()


def invoice_row(session: Session, number: int, *, sent: bool = True, **fields: Any) -> None:
    given = {"status": "final", "due_minor": 1000, "external_id": f"in_{number:02}", **fields}
    made = Invoice(
        id=f"inv_{number:02}",
        tenant_id=given.pop("tenant_id", "acme"),
        seller_id=DEFAULT_SELLER_ID,
        period_id=f"per_{number:02}",
        number=number,
        label=given.pop("label", f"TH-{number:02}"),
        currency=given.pop("currency", "USD"),
        period_start=START,
        period_end=given.pop("period_end", START + timedelta(days=31)),
        timezone="UTC",
        drafted_at=START,
        **given,
    )
    session.add(made)
    session.flush()
    if sent:
        command_row(session, made.id)


def payment_row(session: Session, name: str, **fields: Any) -> None:
    given = {"provider": "stripe", "amount_minor": 500, "status": "succeeded", **fields}
    session.add(
        Payment(
            id=f"pay_{name}",
            tenant_id="acme",
            external_id=given.pop("external_id", f"pi_{name}"),
            reference=name,
            currency="USD",
            created_at=START,
            **given,
        )
    )
    session.flush()


def refund_row(session: Session, name: str, **fields: Any) -> None:
    given = {"provider": "stripe", "amount_minor": 200, "status": "succeeded", **fields}
    session.add(
        Refund(
            id=f"ref_{name}",
            payment_id="pay_a",
            tenant_id="acme",
            external_id=given.pop("external_id", f"re_{name}"),
            reference=f"back {name}",
            currency="USD",
            created_at=START,
            **given,
        )
    )
    session.flush()


def dispute_row(session: Session, name: str, **fields: Any) -> None:
    given = {
        "provider": "stripe",
        "amount_minor": 300,
        "status": "open",
        "withdrawn": True,
        **fields,
    }
    session.add(
        Dispute(
            id=f"dis_{name}",
            payment_id="pay_a",
            tenant_id="acme",
            external_id=f"dp_{name}",
            currency="USD",
            opened_at=START,
            **given,
        )
    )
    session.flush()


def put_invoice(snapshot: ProviderSnapshot, number: int, **fields: Any) -> InvoiceState:
    plain = InvoiceState(f"in_{number:02}", f"inv_{number:02}", "open", "USD", 1000, 1000)
    made = replace(plain, **fields)
    snapshot.add_invoice(made)
    return made


def found(session: Session, snapshot: ProviderSnapshot, check: str) -> list[ProviderDifference]:
    every = compare.find_differences(session, snapshot)
    chosen = [each for each in every if each.difference.check == check]
    return sorted(chosen, key=lambda each: (each.difference.request_ids, each.difference.message))


def lost(check: str, name: str, message: str, record: Any = None) -> ProviderDifference:
    return ProviderDifference(Difference(check, "lost", message, 1, 0, (name,)), record)


def off(check: str, name: str, cents: int, message: str, record: Any = None) -> ProviderDifference:
    made = Difference(check, "amount", message, 1, cents * CENT, (name,))
    return ProviderDifference(made, record)
