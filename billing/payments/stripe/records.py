"""Stripe's records created within a window, for reconciliation."""

from collections.abc import Iterator
from typing import Any

import stripe

from billing.payments.base import Record, Window
from billing.payments.stripe.client import list_all
from billing.payments.stripe.invoices import state_of
from billing.payments.stripe.payments import dispute_state, payment_state, refund_state

A_PAGE = 100


def records(client: stripe.StripeClient, window: Window) -> Iterator[Record]:
    """Invoices with their payments, then payments, refunds and disputes, fetched page by page."""
    made = {"gte": int(window.since.timestamp()), "lt": int(window.until.timestamp())}
    wanted: Any = {"limit": A_PAGE, "created": made}
    with_payments: Any = {**wanted, "expand": ["data.payments"]}
    invoices = list_all(lambda: client.v1.invoices.list(with_payments))
    for invoice in invoices:
        yield state_of(invoice)
    payments = list_all(lambda: client.v1.payment_intents.list(wanted))
    for payment in payments:
        yield payment_state(payment)
    refunds = list_all(lambda: client.v1.refunds.list(wanted))
    for refund in refunds:
        yield refund_state(refund)
    disputes = list_all(lambda: client.v1.disputes.list(wanted))
    for dispute in disputes:
        yield dispute_state(dispute)
