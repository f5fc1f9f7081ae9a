"""Customers at Stripe, their methods and their transfers: what is asked and what answers mean."""

from typing import Any

import pytest

from billing.payments.base import (
    Attempt,
    BankInstructions,
    Customer,
    Method,
    Transfer,
)
from billing.payments.stripe import customers, transfers
from tests.billing.payments.stripe_wire import Wire, page


def _method(name: str, created: int, **more: Any) -> dict[str, Any]:
    return {"object": "payment_method", "id": name, "type": "card", "created": created, **more}


@pytest.mark.parametrize(
    ("default", "newest", "chosen", "asked"),
    [
        ("pm_a", False, "pm_a", False),
        ("pm_a", True, "pm_c", True),
        (None, False, "pm_c", True),
        ("pm_gone", False, "pm_c", True),
        ("pm_c", True, "pm_c", False),
    ],
)
def test_which_method_is_the_default(
    default: str | None, newest: bool, chosen: str, asked: bool
) -> None:
    settings = {"default_payment_method": default}
    found = page(
        _method("pm_a", 1, card={"brand": "visa", "last4": "4242"}),
        _method("pm_c", 5, type="sepa_debit", sepa_debit={"last4": "3000"}),
        _method(
            "pm_b", 5, type="us_bank_account", us_bank_account={"bank_name": None, "last4": "6789"}
        ),
        _method("pm_0", 3, type="some_thing"),
        _method("pm_1", 3, card={"brand": None, "last4": "1"}),
        _method("pm_2", 3, us_bank_account={"bank_name": "First", "last4": None}),
        _method("pm_3", 3, sepa_debit={"last4": None}),
    )
    wire = Wire(
        {
            "GET customers/cus_1/payment_methods": found,
            "GET customers/cus_1": {"object": "customer", "id": "c", "invoice_settings": settings},
            "POST customers/cus_1": {"object": "customer", "id": "c"},
        }
    )
    assert customers.methods(wire.client(), "cus_1", newest) == [
        Method(name, label, name == chosen)
        for name, label in (
            ("pm_a", "Visa 4242"),
            ("pm_c", "SEPA debit 3000"),
            ("pm_b", "Bank account 6789"),
            ("pm_0", "some thing"),
            ("pm_1", "Card 1"),
            ("pm_2", "First"),
            ("pm_3", "SEPA debit"),
        )
    ]
    assert wire.forms("GET customers/cus_1/payment_methods") == [{"limit": "100"}]
    changed = [{"invoice_settings[default_payment_method]": chosen}] if asked else []
    assert wire.forms("POST") == changed
    assert customers.default_method(wire.client(), "cus_1") is not None


def test_a_customer_its_links_and_one_that_is_deleted() -> None:
    wire = Wire(
        {
            "POST customers": {"object": "customer", "id": "cus_1"},
            "GET customers/cus_1": {"object": "customer", "id": "cus_1", "deleted": True},
            "POST checkout/sessions": {"object": "checkout.session", "id": "cs", "url": None},
            "POST billing_portal/sessions": {
                "object": "billing_portal.session",
                "url": "https://p",
            },
        }
    )
    client = wire.client()
    assert customers.open_customer(client, Customer("acme", "Acme"), Attempt("k")) == "cus_1"
    customers.open_customer(client, Customer("acme", "Acme", "a@b"), Attempt("k"))
    named = {"name": "Acme", "metadata[tollhouse_tenant]": "acme"}
    assert wire.forms("POST customers") == [named, named | {"email": "a@b"}]
    assert wire.calls[0].key == "k:customer"
    assert customers.setup_link(client, "cus_1", "https://r", ("card", "sepa_debit")) == ""
    assert wire.calls[-1].form == {
        "mode": "setup",
        "customer": "cus_1",
        "success_url": "https://r",
        "cancel_url": "https://r",
        "payment_method_types[0]": "card",
        "payment_method_types[1]": "sepa_debit",
    }
    assert customers.portal_link(client, "cus_1", "https://r") == "https://p"
    assert wire.calls[-1].form == {"customer": "cus_1", "return_url": "https://r"}
    assert customers.methods(client, "cus_1") == []


def test_what_a_customer_needs_to_transfer_money() -> None:
    assert [transfers.terms(Transfer(each, "DE")) for each in ("USD", "GBP", "JPY")] == [
        {"type": "us_bank_transfer"},
        {"type": "gb_bank_transfer"},
        {"type": "jp_bank_transfer"},
    ]
    details = {"iban": "DE1", "bic": "X", "account_holder_name": "Payee", "empty": "", "n": 5}
    addresses = [{"type": "iban", "iban": details}, {"type": "aba"}]
    found = {"object": "funding_instructions", "bank_transfer": {"financial_addresses": addresses}}
    wire = Wire({"POST customers/cus_1/funding_instructions": found})
    rows = (("IBAN", "DE1"), ("BIC", "X"), ("Account holder name", "Payee"))
    told = transfers.instructions(wire.client(), "cus_1", Transfer("EUR", "FR"))
    assert told == BankInstructions("EUR", rows)
    assert wire.calls[0].form == {
        "currency": "eur",
        "funding_type": "bank_transfer",
        "bank_transfer[type]": "eu_bank_transfer",
        "bank_transfer[eu_bank_transfer][country]": "FR",
    }
