"""Meter events, for accounts whose usage Stripe prices."""

import stripe

from billing.payments.base import Refused, UsageReport
from billing.payments.stripe.client import ask


def report(client: stripe.StripeClient, wanted: UsageReport) -> None:
    """Report usage. A duplicate identifier counts as delivered."""
    try:
        ask(
            lambda: client.v1.billing.meter_events.create(
                {
                    "event_name": wanted.meter,
                    "identifier": wanted.identifier,
                    "timestamp": int(wanted.at.timestamp()),
                    "payload": {
                        "stripe_customer_id": wanted.customer_id,
                        "value": str(wanted.value),
                    },
                }
            )
        )
    except Refused as error:
        if not _is_duplicate(error):
            raise


def _is_duplicate(error: Refused) -> bool:
    cause = error.__cause__
    if not isinstance(cause, stripe.InvalidRequestError) or cause.http_status != 400:
        return False
    said = (cause.user_message or "").lower()
    return cause.code == "duplicate_meter_event" or "already exists with identifier" in said
