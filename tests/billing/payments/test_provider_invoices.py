"""Invoices against a provider's records that are written here: every difference, whole, and nothing
else. What the provider's own fake tells is in `test_compare`."""

import pytest
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.differences import Difference
from billing.invoicing.tables import CreditNote
from billing.payments.base import InvoiceState
from billing.payments.compare import ProviderDifference
from billing.payments.provider_snapshot import ProviderSnapshot
from tests.billing.conftest import START
from tests.billing.payments.provider_rows import (
    CENT,
    command_row,
    event_row,
    found,
    invoice_row,
    lost,
    off,
    payment_row,
    put_invoice,
)


@pytest.fixture
def snapshot() -> ProviderSnapshot:
    return ProviderSnapshot("stripe", START)


def test_the_total_of_an_invoice_and_what_is_open_of_it(
    session: Session, snapshot: ProviderSnapshot
) -> None:
    check = "invoices/stripe"
    for number in range(1, 10):
        invoice_row(session, number)
    put_invoice(snapshot, 1)
    put_invoice(snapshot, 2, total_minor=1001)
    put_invoice(snapshot, 3, currency="EUR")
    wrong = put_invoice(snapshot, 4, remaining_minor=500)
    put_invoice(snapshot, 5, remaining_minor=480)
    put_invoice(snapshot, 6, status="paid", remaining_minor=0)
    put_invoice(snapshot, 7, status="paid", remaining_minor=0)
    still_open = put_invoice(snapshot, 8, remaining_minor=0)
    draft = put_invoice(snapshot, 9, status="draft")
    for number in (4, 5):
        payment_row(session, f"part {number}", invoice_id=f"inv_{number:02}", amount_minor=400)
        payment_row(session, f"lost {number}", invoice_id=f"inv_{number:02}", status="failed")
        note = CreditNote(
            id=f"note_{number}",
            invoice_id=f"inv_{number:02}",
            tenant_id="acme",
            seller_id=DEFAULT_SELLER_ID,
            number=number,
            label=f"CN-{number}",
            currency="USD",
            net_minor=100,
            tax_minor=20,
            outcome="due",
            reason="",
            reference=f"note {number}",
            transaction_id="txn",
            issued_at=START,
        )
        session.add(note)
    payment_row(session, "all", invoice_id="inv_06", amount_minor=1000)
    payment_row(session, "too much", invoice_id="inv_07", amount_minor=1200)
    payment_row(session, "all of it", invoice_id="inv_08", amount_minor=1000)
    assert found(session, snapshot, check) == [
        off(check, "in_02", 1, "invoice TH-02 is over 1000 USD here, 1001 USD at the provider"),
        off(check, "in_03", 0, "invoice TH-03 is over 1000 USD here, 1000 EUR at the provider"),
        off(
            check,
            "in_04",
            20,
            "invoice TH-04 is open with 480 open here, open with 500 open at the provider",
            wrong,
        ),
        off(
            check,
            "in_08",
            0,
            "invoice TH-08 is paid with 0 open here, open with 0 open at the provider",
            still_open,
        ),
        off(
            check,
            "in_09",
            0,
            "invoice TH-09 is open with 1000 open here, draft with 1000 open at the provider",
            draft,
        ),
    ]


def test_an_invoice_that_is_void_or_written_off(
    session: Session, snapshot: ProviderSnapshot
) -> None:
    check = "invoices/stripe"
    for number in (1, 2, 3, 4, 5):
        invoice_row(session, number, status="void")
    for number in (6, 7):
        invoice_row(session, number, status="uncollectible")
    put_invoice(snapshot, 1, status="void", remaining_minor=0)
    opened = put_invoice(snapshot, 2)
    put_invoice(snapshot, 3, status="paid", remaining_minor=0)  # what came is credit
    unpaid = put_invoice(snapshot, 4, status="paid", remaining_minor=0)
    waits = put_invoice(snapshot, 5, remaining_minor=0)
    put_invoice(snapshot, 6, status="uncollectible", remaining_minor=0)
    paid = put_invoice(snapshot, 7, status="paid", remaining_minor=0)
    for number in (3, 5, 7):
        payment_row(session, f"of {number}", invoice_id=f"inv_{number:02}", amount_minor=1000)

    def _says(number: int, here: str, there: str, record: InvoiceState) -> ProviderDifference:
        left = record.remaining_minor
        ours, theirs = f"{here} with 0 open here", f"{there} with {left} open at the provider"
        message = f"invoice TH-{number:02} is {ours}, {theirs}"
        return off(check, f"in_{number:02}", left, message, record)

    assert found(session, snapshot, check) == [
        _says(2, "void", "open", opened),
        _says(4, "void", "paid", unpaid),
        _says(5, "void", "open", waits),
        _says(7, "uncollectible", "paid", paid),
    ]


def test_what_is_on_its_way_or_was_never_sent_is_not_compared(
    session: Session, snapshot: ProviderSnapshot
) -> None:
    check = "invoices/stripe"
    invoice_row(session, 1, sent=False)
    invoice_row(session, 2, sent=False)
    invoice_row(session, 3, sent=False)
    for number in range(4, 12):
        invoice_row(session, number)
    command_row(session, "inv_02", provider="fake")
    command_row(session, "inv_03", "collect")
    command_row(session, "inv_04", "lower", done_at=None)  # on its way
    command_row(session, "inv_05", "lower", done_at=None, provider="fake")
    command_row(session, "inv_06", "lower", done_at=None, failed=True)
    event_row(session, "in_07")  # on its way
    event_row(session, "in_08", provider="fake")
    event_row(session, "in_09", done_at=START)
    event_row(session, "in_10", parked="strange")
    for number in range(1, 12):
        put_invoice(snapshot, number, total_minor=999)
    listed = found(session, snapshot, check)
    names = [each.difference.request_ids for each in listed]
    assert names == [("in_05",), ("in_06",), ("in_08",), ("in_09",), ("in_10",), ("in_11",)]
    assert {each.difference.units for each in listed} == {-CENT}


def test_an_invoice_that_is_gone_doubled_or_under_another_name(
    session: Session, snapshot: ProviderSnapshot
) -> None:
    check = "invoices/stripe"
    for number in range(1, 8):
        invoice_row(session, number)
    event_row(session, "in_06")
    command_row(session, "inv_05", "close", done_at=None)
    snapshot.expected_ids = {"in_01", "in_03", "in_04", "in_05", "in_06"}  # not in_02
    put_invoice(snapshot, 3)
    voided = put_invoice(snapshot, 3, external_id="in_3b", status="void")
    put_invoice(snapshot, 4)
    second = put_invoice(snapshot, 4, external_id="in_4b")
    third = put_invoice(snapshot, 4, external_id="in_4c", status="paid")
    put_invoice(snapshot, 7)
    twin = put_invoice(snapshot, 7, external_id="in_7b")
    put_invoice(snapshot, 5, external_id="in_5b")  # its command waits
    put_invoice(snapshot, 6, external_id="in_6b")
    event_row(session, "in_6b")

    def _named(name: str, status: str, number: int, record: InvoiceState) -> ProviderDifference:
        named = f"{name} at stripe ({status}) names invoice inv_{number:02}"
        message = f"{named}, which has another external id"
        return lost(check, name, message, record)

    message = "invoice inv_04 exists 3 times at stripe"
    twice = "invoice inv_07 exists 2 times at stripe"
    names = ("in_04", "in_4b", "in_4c")
    assert found(session, snapshot, check) == [
        lost(check, "in_01", "stripe has no in_01 for invoice TH-01"),
        ProviderDifference(Difference(check, "duplicated", message, 2, 0, names)),
        ProviderDifference(Difference(check, "duplicated", twice, 1, 0, ("in_07", "in_7b"))),
        _named("in_3b", "void", 3, voided),
        _named("in_4b", "open", 4, second),
        _named("in_4c", "paid", 4, third),
        _named("in_7b", "open", 7, twin),
    ]
