"""Final invoices at Stripe: create, add lines, finalize, pay, credit and close.

Our invoice is authoritative. Stripe's copy carries its number and lines; once open, only credit notes
change it. Each step of a retry checks what earlier attempts have done before it acts.
"""

from datetime import UTC, datetime
from typing import Any

import stripe

from billing.payments.base import (
    Attempt,
    Bill,
    InvoiceState,
    Origin,
    PaymentState,
    Refused,
    Status,
)
from billing.payments.stripe import transfers
from billing.payments.stripe.client import ask, change, list_all, metadata_value
from billing.payments.stripe.customers import TENANT, methods
from billing.payments.stripe.payments import payment_state

INVOICE = "tollhouse_invoice"
LINE = "tollhouse_line"
NOTE = "tollhouse_note"
PERIOD = "tollhouse_period"
LINES_A_CALL = 100
_EXPAND: Any = {"expand": ["payments"]}


def send(
    client: stripe.StripeClient, customer_id: str, bill: Bill, attempt: Attempt, *, advance: bool
) -> InvoiceState:
    """`advance` leaves collection and retries to Stripe (Smart Retries)."""
    external_id = attempt.progress.get("invoice") or _create(
        client, customer_id, bill, attempt, advance
    )
    attempt.keep("invoice", external_id)
    found = ask(lambda: client.v1.invoices.retrieve(external_id, _EXPAND))
    if found.status == "draft":
        _add_lines(client, external_id, bill, attempt)
        found = ask(lambda: client.v1.invoices.retrieve(external_id, _EXPAND))
        if found.total != bill.due_minor:
            raise Refused(
                f"Stripe's total of invoice {bill.label} is {found.total} minor units, ours is "
                f"{bill.due_minor}; it stays a draft at Stripe."
            )
        methods(client, customer_id)  # ensures a default method to charge
        change(
            attempt,
            "finalise",
            lambda options: client.v1.invoices.finalize_invoice(
                external_id,
                {"auto_advance": advance},
                options,  # type: ignore[arg-type]
            ),
        )
    return state(client, external_id)


def collect(client: stripe.StripeClient, external_id: str, attempt: Attempt) -> InvoiceState:
    known = state(client, external_id)
    if known.status != "open" or attempt.progress.get("tried"):
        return known
    try:
        change(
            attempt,
            "pay",
            lambda options: client.v1.invoices.pay(
                external_id,
                {"off_session": True},
                options,  # type: ignore[arg-type]
            ),
        )
    except stripe.CardError:
        attempt.keep("tried", True)
    except Refused:
        # No payment method, or already paid: the state tells which.
        attempt.keep("tried", True)
    return state(client, external_id)


def lower(
    client: stripe.StripeClient,
    external_id: str,
    amount_minor: int,
    reason: str,
    attempt: Attempt,
) -> InvoiceState:
    known = state(client, external_id)
    # Saved, because reusing an idempotency key with another amount is an error.
    amount = attempt.progress.get("amount") or min(amount_minor, known.remaining_minor)
    if (
        known.status == "open"
        and amount > 0
        and not _credit_note_exists(client, external_id, attempt)
    ):
        params: Any = {
            "invoice": external_id,
            "lines": [
                {
                    "type": "custom_line_item",
                    "description": reason[:200] or "credit",
                    "quantity": 1,
                    "unit_amount": amount,
                }
            ],
            "memo": reason[:200],
            "metadata": {NOTE: attempt.key},
        }
        attempt.keep("amount", amount)
        change(attempt, "lower", lambda options: client.v1.credit_notes.create(params, options))  # type: ignore[arg-type]
    return state(client, external_id)


def close(
    client: stripe.StripeClient, external_id: str, how: str, attempt: Attempt
) -> InvoiceState:
    known = state(client, external_id)
    if known.status not in ("open", "uncollectible") or known.status == how:
        return known
    service = client.v1.invoices
    if how == "void":
        change(attempt, how, lambda options: service.void_invoice(external_id, {}, options))  # type: ignore[arg-type]
    elif how == "uncollectible":
        change(attempt, how, lambda options: service.mark_uncollectible(external_id, {}, options))  # type: ignore[arg-type]
    else:
        change(
            attempt,
            how,
            lambda options: service.pay(external_id, {"paid_out_of_band": True}, options),  # type: ignore[arg-type]
        )
    return state(client, external_id)


def state(client: stripe.StripeClient, external_id: str) -> InvoiceState:
    found = ask(lambda: client.v1.invoices.retrieve(external_id, _EXPAND))
    return state_of(found, client)


def state_of(found: stripe.Invoice, client: stripe.StripeClient | None = None) -> InvoiceState:
    """With a client, the state of failed payment attempts is fetched too."""
    payments = getattr(found, "payments", None)
    parts = [_payment(found, each, client) for each in (payments.data if payments else [])]
    return InvoiceState(
        external_id=found.id or "",
        invoice_id=metadata_value(found, INVOICE),
        status=found.status or "draft",
        currency=found.currency.upper(),
        total_minor=found.total,
        remaining_minor=found.amount_remaining if found.status == "open" else 0,
        payments=tuple(each for each in parts if each is not None),
        page=found.hosted_invoice_url or "",
        at=datetime.fromtimestamp(found.created, UTC),
        origin=_origin(found),
    )


def _origin(found: stripe.Invoice) -> Origin:
    start = metadata_value(found, PERIOD)
    customer = getattr(found, "customer", None)
    return Origin(
        metadata_value(found, TENANT),
        customer if isinstance(customer, str) else getattr(customer, "id", "") or "",
        getattr(found, "number", None) or "",
        datetime.fromisoformat(start) if start else None,
    )


def _payment(
    invoice: stripe.Invoice, each: stripe.InvoicePayment, client: stripe.StripeClient | None
) -> PaymentState | None:
    intent = each.payment.payment_intent if each.payment else None
    if intent is None:
        return None
    name = intent if isinstance(intent, str) else intent.id
    if each.status == "paid":
        amount = each.amount_paid or 0
        return PaymentState(name, Status.SUCCEEDED, amount, invoice.currency.upper())
    if client is None or not invoice.attempt_count or each.status != "open":
        return None
    found = payment_state(ask(lambda: client.v1.payment_intents.retrieve(name)))
    return found if found.failure or found.in_process else None


def _create(
    client: stripe.StripeClient, customer_id: str, bill: Bill, attempt: Attempt, advance: bool
) -> str:
    if attempt.again:
        page = list_all(lambda: client.v1.invoices.list({"customer": customer_id, "limit": 100}))
        ours = [each for each in page if metadata_value(each, INVOICE) == bill.invoice_id]
        for each in sorted(ours, key=lambda each: each.status == "void"):
            return each.id or ""
    params: Any = {
        "customer": customer_id,
        "currency": bill.currency.lower(),
        "collection_method": "charge_automatically",
        "auto_advance": advance,
        "pending_invoice_items_behavior": "exclude",
        "number": bill.label,
        "metadata": {INVOICE: bill.invoice_id, TENANT: bill.tenant_id},
    }
    if bill.period_start is not None:
        params["metadata"][PERIOD] = bill.period_start.isoformat()
    if bill.methods:
        params["payment_settings"] = _payment_settings(bill)
    if bill.transfer is not None:
        # Stripe takes transfers for invoices that the customer pays, and needs a due date ahead.
        params |= {"collection_method": "send_invoice", "days_until_due": bill.days_to_pay}
    made = change(attempt, "invoice", lambda options: client.v1.invoices.create(params, options))  # type: ignore[arg-type]
    return made.id or ""


def _payment_settings(bill: Bill) -> dict[str, Any]:
    settings: dict[str, Any] = {"payment_method_types": list(bill.methods)}
    if bill.transfer is not None:
        funding = {"funding_type": "bank_transfer", "bank_transfer": transfers.terms(bill.transfer)}
        settings["payment_method_options"] = {"customer_balance": funding}
    return settings


def _add_lines(client: stripe.StripeClient, external_id: str, bill: Bill, attempt: Attempt) -> None:
    there: set[int] = set()
    if attempt.again:
        page = list_all(lambda: client.v1.invoices.line_items.list(external_id, {"limit": 100}))
        there = {int(metadata_value(each, LINE) or 0) for each in page}
    # Always split alike: reusing an idempotency key with other lines is an error.
    for start in range(0, len(bill.lines), LINES_A_CALL):
        part = bill.lines[start : start + LINES_A_CALL]
        if part[0].position in there:
            continue
        params: Any = {
            "lines": [
                {
                    "amount": each.amount_minor,
                    "description": each.description[:500],
                    "period": {
                        "start": int(each.starts_at.timestamp()),
                        "end": int(each.ends_at.timestamp()),
                    },
                    "metadata": {LINE: str(each.position)},
                }
                for each in part
            ]
        }
        change(
            attempt,
            f"lines{start}",
            lambda options, params=params: client.v1.invoices.add_lines(  # type: ignore[misc]
                external_id, params, options
            ),
        )


def _credit_note_exists(client: stripe.StripeClient, external_id: str, attempt: Attempt) -> bool:
    if not attempt.again:
        return False
    page = list_all(lambda: client.v1.credit_notes.list({"invoice": external_id, "limit": 100}))
    return any(metadata_value(each, NOTE) == attempt.key for each in page)
