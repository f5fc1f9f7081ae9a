"""Routes of the fake API."""

import re
from collections.abc import Callable
from typing import Any

from billing.payments.fake_stripe import customers, debits, invoices, payments, taxes
from billing.payments.fake_stripe.objects import ApiError, Object, listing
from billing.payments.fake_stripe.state import StripeState

Form = dict[str, Any]
Route = Callable[[StripeState, list[str], Form, str], Object]


def _balance(state: StripeState, _: list[str], __: Form, ___: str) -> Object:
    return state.maker.make("balance", state.now, available=[], pending=[])


def _get(kind: str) -> Route:
    return lambda state, names, _, __: state.get(kind, names[0])


def _list(kind: str, url: str, *filters: str) -> Route:
    return lambda state, _, form, __: state.page(kind, url, form, *filters)


def _invoices(state: StripeState, _: list[str], form: Form, __: str) -> Object:
    page = state.page("invoice", "/v1/invoices", form, "customer", "status")
    shown = [invoices.expanded(state, each, form) for each in page["data"]]
    return listing("/v1/invoices", shown, has_more=page["has_more"])


def _shown(act: Callable[[StripeState, str, Form], Object]) -> Route:
    """A route that acts on an invoice and returns it, expanded as requested."""
    return lambda state, names, form, _: invoices.expanded(state, act(state, names[0], form), form)


_NAME = r"([A-Za-z_]+_[A-Za-z0-9_]+)"
_TABLE: list[tuple[str, Route]] = [
    ("GET /v1/balance", _balance),
    ("POST /v1/customers", lambda b, n, f, a: customers.create_customer(b, f)),
    ("GET /v1/customers", _list("customer", "/v1/customers", "email")),
    (f"GET /v1/customers/{_NAME}", _get("customer")),
    (f"POST /v1/customers/{_NAME}", lambda b, n, f, a: customers.update_customer(b, n[0], f)),
    (
        f"GET /v1/customers/{_NAME}/payment_methods",
        lambda b, n, f, a: customers.methods_of(b, n[0]),
    ),
    (f"GET /v1/payment_methods/{_NAME}", _get("payment_method")),
    (f"GET /v1/setup_intents/{_NAME}", _get("setup_intent")),
    ("POST /v1/checkout/sessions", lambda b, n, f, a: customers.create_session(b, f, a)),
    ("POST /v1/billing_portal/sessions", lambda b, n, f, a: customers.open_portal(b, f, a)),
    (
        f"POST /v1/customers/{_NAME}/funding_instructions",
        lambda b, n, f, a: debits.instructions(b, n[0], f),
    ),
    (f"GET /v1/checkout/sessions/{_NAME}", _get("checkout.session")),
    ("POST /v1/invoices", _shown(lambda b, n, f: invoices.create(b, f))),
    ("GET /v1/invoices", _invoices),
    (f"GET /v1/invoices/{_NAME}", _shown(lambda b, n, f: b.get("invoice", n))),
    (f"POST /v1/invoices/{_NAME}/add_lines", _shown(invoices.add_lines)),
    (f"GET /v1/invoices/{_NAME}/lines", lambda b, n, f, a: invoices.lines_of(b, n[0], f)),
    (f"POST /v1/invoices/{_NAME}/finalize", _shown(invoices.finalise)),
    (f"POST /v1/invoices/{_NAME}/pay", _shown(invoices.pay)),
    (f"POST /v1/invoices/{_NAME}/void", _shown(lambda b, n, f: invoices.close(b, n, "void"))),
    (
        f"POST /v1/invoices/{_NAME}/mark_uncollectible",
        _shown(lambda b, n, f: invoices.close(b, n, "uncollectible")),
    ),
    ("GET /v1/invoice_payments", _list("invoice_payment", "/v1/invoice_payments", "invoice")),
    ("POST /v1/credit_notes", lambda b, n, f, a: invoices.create_credit_note(b, f)),
    ("GET /v1/credit_notes", _list("credit_note", "/v1/credit_notes", "invoice")),
    ("POST /v1/payment_intents", lambda b, n, f, a: payments.create_intent(b, f)),
    ("GET /v1/payment_intents", _list("payment_intent", "/v1/payment_intents", "customer")),
    (f"GET /v1/payment_intents/{_NAME}", _get("payment_intent")),
    (f"GET /v1/charges/{_NAME}", _get("charge")),
    ("POST /v1/refunds", lambda b, n, f, a: payments.create_refund(b, f)),
    ("GET /v1/refunds", _list("refund", "/v1/refunds", "payment_intent", "charge")),
    (f"GET /v1/refunds/{_NAME}", _get("refund")),
    ("GET /v1/disputes", _list("dispute", "/v1/disputes", "payment_intent", "charge")),
    (f"GET /v1/disputes/{_NAME}", _get("dispute")),
    ("POST /v1/tax/calculations", lambda b, n, f, a: taxes.calculate(b, f)),
    ("POST /v1/billing/meter_events", lambda b, n, f, a: payments.meter_event(b, f)),
]
ROUTES = [(re.compile(pattern + "$"), route) for pattern, route in _TABLE]


def answer(state: StripeState, call: str, form: Form, address: str) -> Object:
    """`call` is like "GET /v1/invoices/in_1"."""
    for pattern, route in ROUTES:
        found = pattern.match(call)
        if found is not None:
            # A create call has no id in its path.
            return route(state, list(found.groups()) or [""], form, address)
    raise ApiError(404, f"Unrecognized request URL ({call}).")
