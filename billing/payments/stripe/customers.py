"""Customers and the payment methods saved through Checkout."""

from collections.abc import Iterator
from typing import Any

import stripe

from billing.payments.base import Attempt, Customer, Method, Window
from billing.payments.stripe.client import ask, change, list_all, metadata_value

TENANT = "tollhouse_tenant"


def open_customer(client: stripe.StripeClient, customer: Customer, attempt: Attempt) -> str:
    params: Any = {"name": customer.name, "metadata": {TENANT: customer.tenant_id}}
    if customer.email:
        params["email"] = customer.email
    made = change(attempt, "customer", lambda options: client.v1.customers.create(params, options))  # type: ignore[arg-type]
    return made.id


def made_within(client: stripe.StripeClient, window: Window) -> Iterator[tuple[str, str]]:
    """Ours, with their tenants, newest first."""
    made: Any = {
        "limit": 100,
        "created": {"gte": int(window.since.timestamp()), "lt": int(window.until.timestamp())},
    }
    for each in list_all(lambda: client.v1.customers.list(made)):
        tenant = metadata_value(each, TENANT)
        if tenant:
            yield tenant, each.id


def setup_link(
    client: stripe.StripeClient, customer_id: str, return_url: str, methods: tuple[str, ...]
) -> str:
    params: Any = {
        "mode": "setup",
        "customer": customer_id,
        "success_url": return_url,
        "cancel_url": return_url,
        "payment_method_types": list(methods),
    }
    made = ask(lambda: client.v1.checkout.sessions.create(params))
    return made.url or ""


def portal_link(client: stripe.StripeClient, customer_id: str, return_url: str) -> str:
    params: Any = {"customer": customer_id, "return_url": return_url}
    return ask(lambda: client.v1.billing_portal.sessions.create(params)).url


def methods(client: stripe.StripeClient, customer_id: str, newest: bool = False) -> list[Method]:
    """The customer's methods. Makes the newest the default if there is none or `newest` is set."""
    customer = ask(lambda: client.v1.customers.retrieve(customer_id))
    if getattr(customer, "deleted", False):
        return []
    page = ask(lambda: client.v1.customers.payment_methods.list(customer_id, {"limit": 100}))
    found = list(page.data)
    settings = customer.invoice_settings
    default = str(settings.default_payment_method or "") if settings else ""
    last = max(found, key=lambda each: (each.created, each.id)).id if found else default
    if last != default and (newest or default not in {each.id for each in found}):
        default = last
        ask(
            lambda: client.v1.customers.update(
                customer_id, {"invoice_settings": {"default_payment_method": default}}
            )
        )
    return [Method(each.id, _label(each), each.id == default) for each in found]


def default_method(client: stripe.StripeClient, customer_id: str) -> str | None:
    return next((m.external_id for m in methods(client, customer_id) if m.is_default), None)


def _label(method: stripe.PaymentMethod) -> str:
    # Stripe leaves out the details of other types.
    card, debit, bank = (
        getattr(method, name, None) for name in ("card", "sepa_debit", "us_bank_account")
    )
    if debit is not None:
        return f"SEPA debit {debit.last4 or ''}".strip()
    if bank is not None:
        return f"{bank.bank_name or 'Bank account'} {bank.last4 or ''}".strip()
    if card is None:
        return method.type.replace("_", " ")
    return f"{(card.brand or 'card').title()} {card.last4}"
