"""The bill that a provider is sent for an invoice, and the methods by which it may be paid."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.payments import methods
from billing.payments.base import (
    Bill,
    BillLine,
    Transfer,
)
from billing.payments.provider_bills import bill_of
from core.errors import BadRequest
from tests.billing.conftest import START
from tests.billing.payments.provider_rows import invoice_row

DAY = timedelta(days=1)


def _line(session: Session, position: int, minor: int, **fields: Any) -> None:
    given = {"kind": "usage", "description": "Output", "project_id": "", "model": "demo", **fields}
    span = {"starts_at": START, "ends_at": START + DAY}
    line = {"invoice_id": "inv_01", "position": position, "amount_minor": minor, "exact": minor}
    session.add(InvoiceLine(**line, **span | given))


def test_a_bill_has_the_lines_of_its_invoice(session: Session) -> None:
    credit = {"promo_minor": 30, "prepaid_minor": 20}
    due = {"final_at": START, "due_at": START + 14 * DAY + timedelta(hours=23)}
    invoice_row(session, 1, status="draft", label=None, due_minor=450, **credit, **due)
    _line(session, 1, 400)
    _line(session, 2, 100, project_id="unknown", description="Input", ends_at=START + 3 * DAY)
    session.get_one(BillingAccount, "acme").payment_methods = ["card"]
    session.flush()
    invoice = session.get_one(Invoice, "inv_01")
    start, end = START, START + 31 * DAY
    assert bill_of(session, invoice) == Bill(
        "inv_01",
        "inv_01",
        "acme",
        "USD",
        450,
        (
            BillLine(1, "Output", 400, START, START + DAY),
            BillLine(2, "Input", 100, START, START + 3 * DAY),
            BillLine(3, "Promotional credit", -30, start, end),
            BillLine(4, "Paid from the prepaid balance", -20, start, end),
        ),
        ("card",),
        None,
        14,
    )
    account = session.get_one(BillingAccount, "acme")
    account.payment_methods, account.tax_region = ["customer_balance"], "de-by"
    assert bill_of(session, invoice).transfer == Transfer("USD", "DE")


@pytest.mark.parametrize(
    ("count", "models", "shown"), [(238, 1, 238), (239, 238, 238), (239, 239, 1)]
)
def test_a_bill_of_many_lines_is_summed_by_model_or_by_kind(
    session: Session, count: int, models: int, shown: int
) -> None:
    invoice_row(session, 1, status="draft", due_minor=count)
    for number in range(count):
        _line(
            session,
            number,
            1,
            model=f"m{number % models:03}",
            kind="late_usage",
            starts_at=START - number * DAY,
            ends_at=START + number * DAY,
        )
    session.flush()
    lines = bill_of(session, session.get_one(Invoice, "inv_01")).lines
    assert (len(lines), sum(each.amount_minor for each in lines)) == (shown, count)
    if shown == 1:
        words = "Late usage (239 lines of our invoice)"
        assert lines == (BillLine(1, words, 239, START - 238 * DAY, START + 238 * DAY),)
    elif count == 239:
        words = "Late usage m000 (2 lines of our invoice)"
        assert lines[0] == BillLine(1, words, 2, START - 238 * DAY, START + 238 * DAY)


def test_methods_are_checked_and_put_in_order() -> None:
    assert methods.checked(None, "USD") is None and methods.checked([], "USD") is None
    chosen = ["us_bank_account", "card", "card"]
    assert methods.checked(chosen, "USD") == ["card", "us_bank_account"]
    with pytest.raises(BadRequest, match=f"There is no payment method '{'m' * 40}'") as told:
        methods.checked(["m" * 50], "USD")
    assert told.value.param == "payment_methods"
    for name, currency, takes in (
        ("sepa_debit", "USD", "EUR"),
        ("us_bank_account", "EUR", "USD"),
        ("customer_balance", "CHF", "USD and EUR and GBP and JPY"),
    ):
        said = f"{name} takes {takes}, and the account is in {currency}"
        with pytest.raises(BadRequest, match=said) as told:
            methods.checked([name], currency)
        assert told.value.param == "payment_methods"
    assert methods.saved(("customer_balance",)) == ("card",)
    assert methods.saved(("customer_balance", "sepa_debit")) == ("sepa_debit",)
    regions = [methods.euro_country(each) for each in ("de", "FR-75", "IE", "nl", "ES", "")]
    assert regions == ["DE", "FR", "IE", "NL", "IE", "IE"]
