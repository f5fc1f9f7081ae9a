"""The provider of demos and the simulation, which keeps all in memory: every state and event, whole."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from billing.payments.base import (
    Attempt,
    BankInstructions,
    Bill,
    BillLine,
    Charge,
    Customer,
    DisputeState,
    Gone,
    InvoiceState,
    Method,
    PaymentState,
    ProviderEvent,
    Record,
    RefundState,
    Refused,
    Status,
    Transfer,
    UsageReport,
    Window,
)
from billing.payments.fake import FakePayments
from core.clock import FakeClock

START = datetime(2026, 1, 1, tzinfo=UTC)
LINE = BillLine(1, "usage", 1200, START, START)
BILL = Bill("inv_1", "TH-000001", "acme", "USD", 1200, (LINE,))
SENT = InvoiceState(
    "in-inv_1",
    "inv_1",
    "open",
    "USD",
    1200,
    1200,
    page="https://pay.invalid/in-inv_1",
    at=START,
)
PAID = PaymentState("pay-in-inv_1", Status.SUCCEEDED, 1200, "USD", at=START)
TOP_UP = Charge("p1", "acme", "USD", 500, "a top-up")


@pytest.fixture
def bank() -> FakePayments:
    return FakePayments(FakeClock(START))


def told(bank: FakePayments) -> list[tuple[str, str, str]]:
    """The events that came since it was last asked."""
    found = [(each.type, each.kind, each.subject_id) for each in bank.events]
    bank.events.clear()
    return found


def sent(bank: FakePayments, card: str | None = "4242") -> InvoiceState:
    if card is not None:
        bank.leave_card("customer-acme", card)
    made = bank.send_invoice("customer-acme", BILL, Attempt("send"))
    bank.events.clear()
    return made


def collect(bank: FakePayments, key: str = "collect") -> InvoiceState:
    return bank.collect_invoice("in-inv_1", Attempt(key))


def test_a_customer_its_pages_and_its_card(bank: FakePayments) -> None:
    assert (bank.name, bank.collects, bank.events) == ("fake", True, [])
    for _ in range(2):
        customer = bank.open_customer(Customer("acme", "Acme"), Attempt("x"))
        assert customer == "customer-acme"
    link = bank.setup_link(customer, "https://back")
    assert link == "https://pay.invalid/customer-acme?return=https://back"
    link = bank.portal_link(customer, "https://back")
    assert link == "https://pay.invalid/portal/customer-acme?return=https://back"
    instructions = bank.bank_instructions(customer, Transfer("EUR", "DE"))
    assert instructions == BankInstructions("EUR", (("Account", "fake-customer-acme"),))
    assert bank.methods(customer) == []
    bank.leave_card(customer)
    assert bank.methods(customer) == [Method("customer-acme-4242", "Fake 4242", True)]
    bank.leave_debit(customer)
    assert bank.methods(customer) == [Method("customer-acme-3000", "Fake 3000", True)]
    assert told(bank) == [("card.left", "method", customer)] * 2


def test_an_invoice_is_sent_once_and_its_lines_add_up(bank: FakePayments) -> None:
    with pytest.raises(Refused, match="The lines of TH-000001 do not sum to 1201"):
        bank.send_invoice("customer-acme", replace(BILL, due_minor=1201), Attempt("x"))
    assert sent(bank) == SENT
    assert bank.send_invoice("other", replace(BILL, due_minor=5), Attempt("y")) == SENT
    assert bank.invoice("in-inv_1") == SENT
    with pytest.raises(Gone, match="There is no object 'in-2'"):
        bank.invoice("in-2")
    assert told(bank) == []


def test_a_good_card_pays_once(bank: FakePayments) -> None:
    sent(bank)
    paid = replace(SENT, status="paid", remaining_minor=0, payments=(PAID,))
    assert collect(bank) == paid and bank.payment("pay-in-inv_1") == PAID
    assert collect(bank, "again") == paid
    assert told(bank) == [
        ("payment.succeeded", "payment", "pay-in-inv_1"),
        ("invoice.paid", "invoice", "in-inv_1"),
    ]


@pytest.mark.parametrize("card", ["0341", "9995", "0069"])
def test_a_refused_card_leaves_the_invoice_open(bank: FakePayments, card: str) -> None:
    sent(bank, card)
    failed = replace(PAID, status=Status.FAILED, failure="Your card was declined.")
    assert collect(bank) == replace(SENT, payments=(failed,))
    assert told(bank) == [
        ("payment.failed", "payment", "pay-in-inv_1"),
        ("invoice.payment_failed", "invoice", "in-inv_1"),
    ]
    bank.leave_card("customer-acme")
    assert collect(bank).status == "open", "the same attempt is not made again"
    assert collect(bank, "again").status == "paid"


def test_without_a_card_nothing_is_collected(bank: FakePayments) -> None:
    sent(bank, None)
    assert collect(bank) == SENT and told(bank) == []
    charged = bank.charge("customer-acme", TOP_UP, Attempt("c"))
    why = "There is no payment method to charge."
    assert charged == PaymentState("", Status.FAILED, 500, "USD", why, "p1")
    with pytest.raises(Gone):
        bank.payment("pay-p1")


@pytest.mark.parametrize("failure", ["", "no funds"])
def test_a_debit_is_answered_by_the_bank_days_later(bank: FakePayments, failure: str) -> None:
    sent(bank, "3000")
    other = replace(BILL, invoice_id="inv_0")
    bank.send_invoice("customer-acme", other, Attempt("other"))
    waits = replace(PAID, status=Status.PENDING, in_process=True)
    assert collect(bank) == replace(SENT, payments=(waits,))
    assert told(bank) == [
        ("payment.processing", "payment", "pay-in-inv_1"),
        ("payment.processing", "invoice", "in-inv_1"),
    ]
    bank.settle_debit("pay-in-inv_1", failure)
    status = Status.FAILED if failure else Status.SUCCEEDED
    done = replace(PAID, status=status, failure=failure)
    assert bank.payment("pay-in-inv_1") == done
    assert bank.invoice("in-inv_1") == replace(
        SENT,
        payments=(done,),
        status="open" if failure else "paid",
        remaining_minor=1200 if failure else 0,
    )
    assert bank.invoice("in-inv_0").status == "open" and not bank.invoice("in-inv_0").payments
    assert told(bank) == [
        ("invoice.payment_failed" if failure else "invoice.paid", "invoice", "in-inv_1"),
        ("payment.failed" if failure else "payment.succeeded", "payment", "pay-in-inv_1"),
    ]


def test_a_lowered_invoice_is_paid_when_nothing_is_left(bank: FakePayments) -> None:
    sent(bank)
    lower = bank.lower_invoice
    assert lower("in-inv_1", 200, "", Attempt("a")) == replace(SENT, remaining_minor=1000)
    assert lower("in-inv_1", 200, "", Attempt("a")).remaining_minor == 1000, "once a key"
    gone = replace(SENT, remaining_minor=0, status="paid")
    assert lower("in-inv_1", 1001, "", Attempt("b")) == gone
    assert lower("in-inv_1", 1, "", Attempt("c")) == gone
    assert told(bank) == [("invoice.lowered", "invoice", "in-inv_1")] * 2


@pytest.mark.parametrize(
    ("how", "status"),
    [("void", "void"), ("uncollectible", "uncollectible"), ("paid_elsewhere", "paid")],
)
def test_an_invoice_is_closed_once(bank: FakePayments, how: str, status: str) -> None:
    sent(bank)
    closed = replace(SENT, status=status, remaining_minor=0)
    for _ in range(2):
        assert bank.close_invoice("in-inv_1", how, Attempt("a")) == closed
    assert told(bank) == [(f"invoice.{how}", "invoice", "in-inv_1")]
    later = bank.close_invoice("in-inv_1", "void", Attempt("b"))
    assert later.status == ("void" if status == "uncollectible" else status)


def test_a_top_up_is_charged_once(bank: FakePayments) -> None:
    bank.leave_card("customer-acme")
    bank.events.clear()
    charged = PaymentState("pay-p1", Status.SUCCEEDED, 500, "USD", payment_id="p1", at=START)
    for _ in range(2):
        assert bank.charge("customer-acme", TOP_UP, Attempt("c")) == charged
    assert told(bank) == [("payment.succeeded", "payment", "pay-p1")]


def test_refunds_and_a_dispute_take_no_more_than_was_paid(bank: FakePayments) -> None:
    bank.leave_card("customer-acme")
    bank.charge("customer-acme", TOP_UP, Attempt("c"))
    bank.charge("customer-acme", replace(TOP_UP, payment_id="p2"), Attempt("d"))
    bank.events.clear()
    for _ in range(2):
        made = bank.refund("pay-p1", 200, "r1", Attempt("r"))
        assert made == RefundState(
            "refund-r1", "pay-p1", Status.SUCCEEDED, 200, "USD", "r1", at=START
        )
    bank.refund("pay-p2", 100, "other", Attempt("r"))
    for amount in (301, 0, -1):
        message = f"Payment pay-p1 has 300 left to refund, not {amount}"
        with pytest.raises(Refused, match=message):
            bank.refund("pay-p1", amount, "r2", Attempt("r"))
    assert bank.open_dispute("pay-p1") == "dispute-pay-p1"
    disputed = DisputeState("dispute-pay-p1", "pay-p1", "open", 300, "USD", True, START)
    assert bank.dispute("dispute-pay-p1") == disputed
    assert bank.open_disputes() == ["dispute-pay-p1"]
    for _ in range(2):
        with pytest.raises(Refused, match="Payment pay-p1 has nothing left to dispute"):
            bank.open_dispute("pay-p1")
        with pytest.raises(Refused, match="has 0 left to refund, not 1"):
            bank.refund("pay-p1", 1, "r3", Attempt("r"))
    bank.close_dispute("dispute-pay-p1", "lost")
    assert bank.dispute("dispute-pay-p1") == replace(disputed, status="lost")
    bank.close_dispute("dispute-pay-p1", "won")
    assert bank.dispute("dispute-pay-p1") == replace(disputed, status="won", withdrawn=False)
    assert bank.open_disputes() == []
    bank.refund("pay-p1", 300, "r4", Attempt("r"))
    assert told(bank) == [
        ("refund.made", "refund", "refund-r1"),
        ("refund.made", "refund", "refund-other"),
        ("dispute.opened", "dispute", "dispute-pay-p1"),
        ("dispute.closed", "dispute", "dispute-pay-p1"),
        ("dispute.closed", "dispute", "dispute-pay-p1"),
        ("refund.made", "refund", "refund-r4"),
    ]
    bank.refund("pay-p2", 399, "most", Attempt("r"))
    bank.open_dispute("pay-p2")
    assert bank.dispute("dispute-pay-p2").amount_minor == 1
    bank.close_dispute("dispute-pay-p2", "won")
    del bank._disputes["dispute-pay-p2"]
    bank.refund("pay-p2", 1, "rest", Attempt("r"))
    with pytest.raises(Refused, match="nothing left to dispute"):
        bank.open_dispute("pay-p2")


def test_what_did_not_succeed_is_not_refunded(bank: FakePayments) -> None:
    bank.leave_card("customer-acme", "0341")
    bank.charge("customer-acme", TOP_UP, Attempt("c"))
    with pytest.raises(Refused, match="has 500 left to refund, not 5"):
        bank.refund("pay-p1", 5, "r", Attempt("r"))


def test_usage_counts_once_an_identifier(bank: FakePayments) -> None:
    first = UsageReport("u1", "tokens", "customer-acme", 5, START)
    bank.report_usage(first)
    bank.report_usage(replace(first, value=9))
    assert bank.usage == {"u1": first}


def test_events_are_numbered_and_found_by_a_signed_body(bank: FakePayments) -> None:
    bank.leave_card("a")
    bank.leave_card("b")
    about = {"about": "b"}
    second = ProviderEvent("event-2", "card.left", "method", "b", START, about)
    assert bank.event(json.dumps({"id": "event-2"}).encode(), "fake") == second
    with pytest.raises(Refused, match="The signature is wrong"):
        bank.event(b'{"id": "event-2"}', "other")
    for body in (b"no", b"{}", b"[]", b'{"id": "event-3"}'):
        with pytest.raises(Refused, match="The body is not a known event"):
            bank.event(body, "fake")


def test_records_of_a_window(bank: FakePayments) -> None:
    sent(bank)
    collect(bank)
    bank.clock.advance(days=1)  # type: ignore[attr-defined]
    bank.refund("pay-in-inv_1", 200, "r", Attempt("r"))
    bank.open_dispute("pay-in-inv_1")
    day = timedelta(days=1)

    def _kinds(window: Window) -> list[type[Record]]:
        return [type(each) for each in bank.records(window)]

    assert _kinds(Window(START, START + day)) == [InvoiceState, PaymentState]
    assert _kinds(Window(START + day, START + 2 * day)) == [RefundState, DisputeState]
    assert _kinds(Window(START - day, START)) == []
