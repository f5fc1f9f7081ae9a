"""Whoever moves the money, one contract: by hand, in memory, and Stripe's library over HTTP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from billing.payments.base import (
    Attempt,
    Bill,
    BillLine,
    Charge,
    Customer,
    PaymentProvider,
    Refused,
    Status,
    Transfer,
    UsageReport,
    Window,
)
from billing.payments.fake import FakePayments
from billing.payments.fake_stripe import debits, payments
from billing.payments.fake_stripe.customers import leave_card, leave_debit
from billing.payments.fake_stripe.server import FakeStripe
from billing.payments.fake_stripe.webhooks import signed
from billing.payments.manual import ManualPayments
from billing.payments.stripe.provider import StripePayments
from core.clock import FakeClock, SystemClock

SECRET = "whsec_test"


@dataclass
class Bank:
    """A provider, and what its customers and their banks can do to it."""

    provider: PaymentProvider
    leave_card: Callable[[str, str], Any]
    leave_debit: Callable[[str], Any]
    answer_debit: Callable[[str, str], Any]  # payment, why it failed
    open_dispute: Callable[[str], str]
    close_dispute: Callable[[str, str], Any]
    last_event: Callable[[], tuple[bytes, str]]

    def customer(self) -> str:
        return self.provider.open_customer(
            Customer("acme", "Acme Inc", "money@acme.invalid"), Attempt("customer:acme")
        )


def _fake() -> Bank:
    fake = FakePayments(FakeClock())
    return Bank(
        fake,
        fake.leave_card,
        fake.leave_debit,
        fake.settle_debit,
        fake.open_dispute,
        fake.close_dispute,
        lambda: (b'{"id": "%s"}' % fake.events[-1].id.encode(), "fake"),
    )


def _stripe(stripe: FakeStripe) -> Bank:
    provider = StripePayments(stripe.api_key, api_base=stripe.url, webhook_secret=SECRET)
    books = stripe.books
    return Bank(
        provider,
        lambda customer, last4: leave_card(books, customer, last4),
        lambda customer: leave_debit(books, customer),
        lambda payment, failure: debits.answer(books, payment, failure),
        lambda payment: str(payments.open_dispute(books, payment)["id"]),
        lambda dispute, status: payments.close_dispute(books, dispute, status),
        lambda: signed(books.events[-1], SECRET),
    )


def _nobody(*_: Any) -> Any:
    raise AssertionError("nobody collects here")


@pytest.fixture(params=["manual", "fake", "stripe"])
def bank(request: pytest.FixtureRequest) -> Iterator[Bank]:
    if request.param == "stripe":
        with FakeStripe() as stripe:
            yield _stripe(stripe)
    elif request.param == "fake":
        yield _fake()
    else:
        manual = ManualPayments()
        yield Bank(manual, *[_nobody] * 5, lambda: (b"{}", ""))


@pytest.fixture(params=["fake", "stripe"])
def collecting(request: pytest.FixtureRequest) -> Iterator[Bank]:
    """Those that collect by themselves."""
    if request.param == "stripe":
        with FakeStripe() as stripe:
            yield _stripe(stripe)
    else:
        yield _fake()


def bill(number: int = 1, *amounts: int) -> Bill:
    now = FakeClock().now()
    lines = tuple(
        BillLine(at, f"line {at}", amount, now - timedelta(days=31), now)
        for at, amount in enumerate(amounts or (900, 200, -100), 1)
    )
    due = sum(line.amount_minor for line in lines)
    return Bill(f"inv_{number}", f"TH-{number:06d}", "acme", "USD", due, lines)


def test_a_customer_is_opened_once(bank: Bank) -> None:
    assert bank.customer() == bank.customer() != ""


def test_an_invoice_is_sent_once_with_its_lines_and_is_open(bank: Bank) -> None:
    customer = bank.customer()
    first = bank.provider.send_invoice(customer, bill(), Attempt("invoice:1"))
    again = bank.provider.send_invoice(customer, bill(), Attempt("invoice:1", again=True))
    assert (first.status, first.total_minor, first.remaining_minor) == ("open", 1000, 1000)
    assert (first.invoice_id, first.currency) == ("inv_1", "USD")
    assert again.external_id == first.external_id
    assert bank.provider.invoice(first.external_id).remaining_minor == 1000


def test_more_lines_than_fit_into_one_call_are_all_sent(bank: Bank) -> None:
    sent = bank.provider.send_invoice(
        bank.customer(), bill(2, *range(1, 241)), Attempt("invoice:2")
    )
    assert sent.total_minor == sum(range(1, 241))


def test_a_credit_lowers_an_open_invoice_once(bank: Bank) -> None:
    provider = bank.provider
    sent = provider.send_invoice(bank.customer(), bill(), Attempt("invoice:1"))
    attempt = Attempt("note:1")
    assert provider.lower_invoice(sent.external_id, 300, "outage", attempt).remaining_minor == 700
    attempt.again = True
    assert provider.lower_invoice(sent.external_id, 300, "outage", attempt).remaining_minor == 700
    rest = provider.lower_invoice(sent.external_id, 700, "the rest", Attempt("note:2"))
    assert (rest.status, rest.remaining_minor) == ("paid", 0)


@pytest.mark.parametrize("how", ["void", "uncollectible", "paid_elsewhere"])
def test_an_invoice_is_closed_once_and_then_stays(bank: Bank, how: str) -> None:
    sent = bank.provider.send_invoice(bank.customer(), bill(), Attempt("invoice:1"))
    for again in (False, True):
        closed = bank.provider.close_invoice(sent.external_id, how, Attempt(f"{how}:1", again))
        assert closed.status == ("paid" if how == "paid_elsewhere" else how)
        assert closed.remaining_minor == 0
    collected = bank.provider.collect_invoice(sent.external_id, Attempt("collect:1"))
    assert collected.status == closed.status and not collected.payments


def test_what_is_not_signed_is_refused(bank: Bank) -> None:
    body = b'{"id": "evt_1", "object": "event", "type": "invoice.paid"}'
    for wrong in ("t=1,v1=00", None, "", "t=,v1="):
        with pytest.raises(Refused):
            bank.provider.event(body, wrong)


def test_nobody_knows_what_was_never_there(bank: Bank) -> None:
    for ask in (bank.provider.invoice, bank.provider.payment, bank.provider.refund_state):
        with pytest.raises(Refused):
            ask("pi_0000000000000000")
    with pytest.raises(Refused):
        bank.provider.dispute("dp_0000000000000000")


def test_usage_is_reported_once_an_identifier(bank: Bank) -> None:
    report = UsageReport("acme:2026-01-01T00:tokens:0", "tokens", bank.customer(), 7, _now(bank))
    bank.provider.report_usage(report)
    bank.provider.report_usage(report)


def test_by_hand_a_charge_waits_for_a_person() -> None:
    manual = ManualPayments()
    made = manual.charge("acme", Charge("pay_1", "acme", "USD", 500, ""), Attempt("charge:1"))
    assert (made.status, made.payment_id) == (Status.PENDING, "pay_1")
    with pytest.raises(Refused, match="by hand"):
        manual.setup_link("acme", "https://acme.invalid")
    with pytest.raises(Refused, match="by hand"):
        manual.portal_link("acme", "https://acme.invalid")
    with pytest.raises(Refused, match="no virtual account"):
        manual.bank_instructions("acme", Transfer("EUR", "DE"))


def test_a_left_card_is_the_default_and_is_named(collecting: Bank) -> None:
    customer = collecting.customer()
    assert collecting.provider.setup_link(customer, "https://acme.invalid/back").startswith("http")
    assert collecting.provider.methods(customer) == []
    collecting.leave_card(customer, "4242")
    event = collecting.provider.event(*collecting.last_event())
    assert (event.kind, event.subject_id) == ("method", customer)
    (method,) = collecting.provider.methods(customer)
    assert method.is_default and method.label.endswith("4242")
    collecting.leave_card(customer, "0341")
    chosen = collecting.provider.methods(customer, newest=True)
    assert [each.label[-4:] for each in chosen if each.is_default] == ["0341"]


def test_an_invoice_is_collected_once(collecting: Bank) -> None:
    provider, customer = collecting.provider, collecting.customer()
    collecting.leave_card(customer, "4242")
    sent = provider.send_invoice(customer, bill(), Attempt("invoice:1"))
    for again in (False, True):
        paid = provider.collect_invoice(sent.external_id, Attempt("collect:1", again))
        assert (paid.status, paid.remaining_minor) == ("paid", 0)
        (payment,) = paid.payments
        assert (payment.status, payment.amount_minor) == (Status.SUCCEEDED, 1000)
    assert provider.payment(payment.external_id).status is Status.SUCCEEDED
    event = provider.event(*collecting.last_event())
    assert (event.kind, event.subject_id) == ("invoice", sent.external_id)


def test_a_refused_card_is_a_failed_payment_and_a_better_one_pays(collecting: Bank) -> None:
    provider, customer = collecting.provider, collecting.customer()
    sent = provider.send_invoice(customer, bill(), Attempt("invoice:1"))
    without = provider.collect_invoice(sent.external_id, Attempt("collect:0"))
    assert (without.status, without.payments) == ("open", ())
    collecting.leave_card(customer, "0341")
    provider.methods(customer)
    refused = provider.collect_invoice(sent.external_id, Attempt("collect:1"))
    assert refused.status == "open" and refused.remaining_minor == 1000
    assert refused.payments[0].status is Status.FAILED and "declined" in refused.payments[0].failure


def test_a_charge_is_taken_once_or_says_why_not(collecting: Bank) -> None:
    provider, customer = collecting.provider, collecting.customer()
    wanted = Charge("pay_1", "acme", "USD", 2500, "Top-up")
    bare = provider.charge(customer, Charge("pay_0", "acme", "USD", 1, ""), Attempt("charge:0"))
    assert bare.status is Status.FAILED and "no payment method" in bare.failure
    collecting.leave_card(customer, "4242")
    first = provider.charge(customer, wanted, Attempt("charge:1"))
    again = provider.charge(customer, wanted, Attempt("charge:1", again=True))
    assert first.status is again.status is Status.SUCCEEDED
    assert first.external_id == again.external_id and again.payment_id == "pay_1"


@pytest.mark.parametrize("failure", ["", "The account is closed."])
def test_a_debit_is_pending_until_the_bank_answers(collecting: Bank, failure: str) -> None:
    provider, customer = collecting.provider, collecting.customer()
    collecting.leave_debit(customer)
    provider.methods(customer)
    sent = provider.send_invoice(customer, bill(), Attempt("invoice:1"))
    for again in (False, True):
        waits = provider.collect_invoice(sent.external_id, Attempt("collect:1", again))
        assert (waits.status, waits.remaining_minor) == ("open", 1000)
        (payment,) = waits.payments
        assert payment.status is Status.PENDING and payment.in_process
    collecting.answer_debit(payment.external_id, failure)
    after = provider.invoice(sent.external_id)
    assert after.status == ("open" if failure else "paid")
    assert after.payments[0].status is (Status.FAILED if failure else Status.SUCCEEDED)
    assert provider.payment(payment.external_id).failure == failure


def test_the_provider_has_a_portal_and_virtual_accounts(collecting: Bank) -> None:
    provider, customer = collecting.provider, collecting.customer()
    assert provider.portal_link(customer, "https://acme.invalid/back").startswith("http")
    first = provider.bank_instructions(customer, Transfer("EUR", "DE"))
    assert first.rows and first == provider.bank_instructions(customer, Transfer("EUR", "DE"))


def test_a_refused_charge_says_why(collecting: Bank) -> None:
    customer = collecting.customer()
    collecting.leave_card(customer, "9995")
    made = collecting.provider.charge(
        customer, Charge("pay_1", "acme", "USD", 2500, ""), Attempt("charge:1")
    )
    assert made.status is Status.FAILED and made.failure


def test_a_refund_is_made_once_and_never_above_what_was_paid(collecting: Bank) -> None:
    provider, customer = collecting.provider, collecting.customer()
    collecting.leave_card(customer, "4242")
    paid = provider.charge(customer, Charge("pay_1", "acme", "USD", 1000, ""), Attempt("charge:1"))
    first = provider.refund(paid.external_id, 400, "ref_1", Attempt("refund:1"))
    again = provider.refund(paid.external_id, 400, "ref_1", Attempt("refund:1", again=True))
    assert first.external_id == again.external_id and first.status is Status.SUCCEEDED
    assert provider.refund_state(first.external_id).reference == "ref_1"
    with pytest.raises(Refused):
        provider.refund(paid.external_id, 601, "ref_2", Attempt("refund:2"))


@pytest.mark.parametrize("status", ["won", "lost"])
def test_a_dispute_takes_the_money_until_it_is_won(collecting: Bank, status: str) -> None:
    provider, customer = collecting.provider, collecting.customer()
    collecting.leave_card(customer, "4242")
    paid = provider.charge(customer, Charge("pay_1", "acme", "USD", 900, ""), Attempt("charge:1"))
    name = collecting.open_dispute(paid.external_id)
    opened = provider.dispute(name)
    assert (opened.status, opened.withdrawn, opened.amount_minor) == ("open", True, 900)
    assert opened.payment_external_id == paid.external_id
    collecting.close_dispute(name, status)
    closed = provider.dispute(name)
    assert (closed.status, closed.withdrawn) == (status, status == "lost")
    event = provider.event(*collecting.last_event())
    assert (event.kind, event.subject_id) == ("dispute", name)


def test_everything_is_listed_for_reconciliation(collecting: Bank) -> None:
    provider, customer = collecting.provider, collecting.customer()
    collecting.leave_card(customer, "4242")
    sent = provider.send_invoice(customer, bill(), Attempt("invoice:1"))
    (paid,) = provider.collect_invoice(sent.external_id, Attempt("collect:1")).payments
    refund = provider.refund(paid.external_id, 100, "ref_1", Attempt("refund:1"))
    dispute = collecting.open_dispute(paid.external_id)
    now, day = _now(collecting), timedelta(days=1)
    listed = {each.external_id for each in provider.records(Window(now - day, now + day))}
    assert listed == {sent.external_id, paid.external_id, refund.external_id, dispute}
    earlier = provider.records(Window(now - 3 * day, now - 2 * day))
    assert paid.external_id not in {each.external_id for each in earlier}


def _now(bank: Bank) -> Any:
    return SystemClock().now() if bank.provider.name == "stripe" else FakeClock().now()
