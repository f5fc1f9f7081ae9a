"""Top-up charges, refunds and disputes at Stripe."""

from datetime import UTC, datetime
from typing import Any

import stripe

from billing.payments.base import (
    Attempt,
    Charge,
    DisputeState,
    Origin,
    PaymentState,
    RefundState,
    Status,
)
from billing.payments.methods import saved
from billing.payments.stripe.client import change, list_all, metadata_value
from billing.payments.stripe.customers import TENANT, default_method

PAYMENT = "tollhouse_payment"
REFUND = "tollhouse_refund"
_FAILED = ("canceled", "requires_payment_method")
# Dispute statuses in which no money is withdrawn: inquiries, and disputes won or prevented.
_NOT_WITHDRAWN = ("won", "prevented", "warning_needs_response", "warning_under_review")


def charge(
    client: stripe.StripeClient, customer_id: str, wanted: Charge, attempt: Attempt
) -> PaymentState:
    if attempt.again:
        page = list_all(
            lambda: client.v1.payment_intents.list({"customer": customer_id, "limit": 100})
        )
        for each in page:
            if metadata_value(each, PAYMENT) == wanted.payment_id:
                return payment_state(each)
    method = attempt.progress.get("method") or default_method(client, customer_id)
    if method is None:
        return _refused(wanted, "", "There is no payment method to charge.")
    attempt.keep("method", method)
    params: Any = {
        "amount": wanted.amount_minor,
        "currency": wanted.currency.lower(),
        "customer": customer_id,
        "payment_method": method,
        "off_session": True,
        "confirm": True,
        "description": wanted.description,
        "metadata": {PAYMENT: wanted.payment_id, TENANT: wanted.tenant_id},
    }
    if wanted.methods:
        params["payment_method_types"] = list(saved(wanted.methods))
    try:
        made = change(
            attempt,
            "charge",
            lambda options: client.v1.payment_intents.create(params, options),  # type: ignore[arg-type]
        )
    except stripe.CardError as error:
        intent = error.error.payment_intent if error.error else None
        name = getattr(intent, "id", "") or ""
        return _refused(wanted, name, error.user_message or "The card was declined.")
    return payment_state(made)


def payment_state(found: stripe.PaymentIntent) -> PaymentState:
    problem = found.last_payment_error
    failure = (problem.message or problem.code or "refused") if problem else ""
    status = Status.PENDING
    if found.status == "succeeded":
        status, failure = Status.SUCCEEDED, ""
    elif found.status == "canceled" or (found.status in _FAILED and failure):
        status, failure = Status.FAILED, failure or "canceled"
    amount = found.amount_received if status is Status.SUCCEEDED else found.amount
    return PaymentState(
        found.id,
        status,
        amount or found.amount,
        found.currency.upper(),
        failure,
        metadata_value(found, PAYMENT),
        found.status == "processing",
        datetime.fromtimestamp(found.created, UTC),
        Origin(metadata_value(found, TENANT), _name(getattr(found, "customer", None))),
    )


def refund(
    client: stripe.StripeClient,
    payment_external_id: str,
    amount_minor: int,
    reference: str,
    attempt: Attempt,
) -> RefundState:
    if attempt.again:
        page = list_all(
            lambda: client.v1.refunds.list({"payment_intent": payment_external_id, "limit": 100})
        )
        for each in page:
            if metadata_value(each, REFUND) == reference:
                return refund_state(each)
    params: Any = {
        "payment_intent": payment_external_id,
        "amount": amount_minor,
        "metadata": {REFUND: reference},
    }
    made = change(attempt, "refund", lambda options: client.v1.refunds.create(params, options))  # type: ignore[arg-type]
    return refund_state(made)


def refund_state(found: stripe.Refund) -> RefundState:
    status = Status.PENDING
    if found.status == "succeeded":
        status = Status.SUCCEEDED
    elif found.status in ("failed", "canceled"):
        status = Status.FAILED
    return RefundState(
        found.id,
        _name(found.payment_intent),
        status,
        found.amount,
        found.currency.upper(),
        metadata_value(found, REFUND),
        getattr(found, "failure_reason", None) or "",
        datetime.fromtimestamp(found.created, UTC),
    )


def dispute_state(found: stripe.Dispute) -> DisputeState:
    status = found.status if found.status in ("won", "lost") else "open"
    if found.status.startswith("warning") or found.status == "prevented":
        status = found.status
    return DisputeState(
        found.id,
        _name(found.payment_intent),
        status,
        found.amount,
        found.currency.upper(),
        found.status not in _NOT_WITHDRAWN and found.status != "warning_closed",
        datetime.fromtimestamp(found.created, UTC),
    )


def _name(reference: Any) -> str:
    return reference if isinstance(reference, str) else getattr(reference, "id", "") or ""


def _refused(wanted: Charge, name: str, why: str) -> PaymentState:
    return PaymentState(
        name, Status.FAILED, wanted.amount_minor, wanted.currency, why, wanted.payment_id
    )
