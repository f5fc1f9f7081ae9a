"""Signed webhook events: verification of the raw body, and the object they concern."""

from datetime import UTC, datetime
from typing import Any

import stripe

from billing.payments.base import ProviderEvent, Refused
from core.clock import usual

# Kind of an event by its type or type prefix; the longest match wins.
_KINDS = {
    "invoice.": "invoice",
    "invoice.created": "nothing",
    "invoice.upcoming": "nothing",
    "invoice_payment.": "invoice",
    "payment_intent.": "payment",
    "payment_intent.created": "nothing",
    "refund.": "refund",
    "charge.": "nothing",
    "charge.refund.updated": "refund",
    "charge.dispute.": "dispute",
    "checkout.session.": "nothing",
    "checkout.session.completed": "method",
    "setup_intent.": "nothing",
    "setup_intent.succeeded": "method",
    "payment_method.": "customer",
    "payment_method.attached": "method",
    "customer.": "nothing",
    "customer.updated": "customer",
    "credit_note.": "nothing",
    "invoiceitem.": "nothing",
    "balance.": "nothing",
    "billing_portal.": "nothing",
    "cash_balance.": "nothing",
    "customer_cash_balance_transaction.": "nothing",
    "payout.": "nothing",
    "mandate.": "nothing",
    "billing.meter.": "nothing",
}


def event(body: bytes, signature: str | None, secret: str) -> ProviderEvent:
    if not secret:
        raise Refused(
            "TOLLHOUSE_STRIPE_WEBHOOK_SECRET is not set, so events cannot be verified: set it."
        )
    try:
        stripe.WebhookSignature.verify_header(
            body, signature, secret, stripe.Webhook.DEFAULT_TOLERANCE
        )
        found = stripe.Webhook.construct_event_without_verification(body).to_dict()
    except stripe.SignatureVerificationError as error:
        raise Refused(f"The signature is wrong: {error.user_message}") from None
    except (ValueError, AttributeError, TypeError, UnicodeDecodeError):
        raise Refused("The body is not a Stripe event.") from None
    return read(found)


def read(found: dict[str, Any]) -> ProviderEvent:
    """Parse an event. Raises Refused if it is malformed."""
    about = found.get("data", {}).get("object") if isinstance(found.get("data"), dict) else None
    kind, name = str(found.get("type", "")), str(found.get("id", ""))
    if not isinstance(about, dict) or not kind or not name:
        raise Refused("The body is not a Stripe event.")
    subject = kind_of(kind)
    try:
        moment = usual(datetime.fromtimestamp(int(found.get("created") or 0), UTC))
    except (ValueError, OverflowError, OSError, TypeError):
        raise Refused(f"The event's created is {str(found.get('created'))[:40]!r}.") from None
    return ProviderEvent(name, kind, subject, _subject(subject, about), moment, found)


def kind_of(type_: str) -> str:
    names = [
        name for name in _KINDS if type_ == name or (name.endswith(".") and type_.startswith(name))
    ]
    return _KINDS[max(names, key=len)] if names else "unknown"


def _subject(kind: str, about: dict[str, Any]) -> str:
    if kind == "invoice":
        return _id(about.get("invoice")) if about.get("object") == "invoice_payment" else _id(about)
    if kind in ("customer", "method"):
        return _id(about) if about.get("object") == "customer" else _id(about.get("customer"))
    return _id(about)


def _id(value: Any) -> str:
    return str(value.get("id") or "") if isinstance(value, dict) else str(value or "")
