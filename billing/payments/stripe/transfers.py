"""Bank transfers to a virtual account of the customer at Stripe, and what invoices say of them."""

from typing import Any

import stripe

from billing.payments.base import BankInstructions, Transfer
from billing.payments.stripe.client import ask

_TYPES = {
    "USD": "us_bank_transfer",
    "EUR": "eu_bank_transfer",
    "GBP": "gb_bank_transfer",
    "JPY": "jp_bank_transfer",
}
_NAMES = {"bic": "BIC", "iban": "IBAN", "swift_code": "SWIFT code"}


def terms(transfer: Transfer) -> dict[str, Any]:
    """`bank_transfer` as invoices, payment intents and funding instructions take it."""
    kind = _TYPES[transfer.currency]
    if kind == "eu_bank_transfer":
        return {"type": kind, kind: {"country": transfer.country}}
    return {"type": kind}


def instructions(
    client: stripe.StripeClient, customer_id: str, transfer: Transfer
) -> BankInstructions:
    params: Any = {
        "currency": transfer.currency.lower(),
        "funding_type": "bank_transfer",
        "bank_transfer": terms(transfer),
    }
    found = ask(lambda: client.v1.customers.funding_instructions.create(customer_id, params))
    addresses = found.to_dict()["bank_transfer"].get("financial_addresses") or []
    rows: list[tuple[str, str]] = []
    for address in addresses:
        details = address.get(address["type"]) or {}
        rows += [
            (_NAMES.get(name, name.replace("_", " ").capitalize()), str(value))
            for name, value in details.items()
            if isinstance(value, str) and value
        ]
    return BankInstructions(transfer.currency, tuple(rows))
