"""Where the money of a payment lies, and where it goes back: every balance is computed by hand.

The invoice of each test is 12.00 (20 million output tokens at 0.60 a million), without tax.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from billing.invoicing import credit_notes, invoice_run, open_amounts
from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.payments import posting, settlement
from billing.payments.base import DisputeState, RefundState, Status
from billing.payments.tables import Payment, Refund
from core.errors import BadRequest, Conflict, NotFound
from core.money import Money, units_of
from tests.billing.conftest import Deployment
from tests.billing.invoicing.test_invoices import clean

TOKENS = 20_000_000


@dataclass
class Customer:
    """One tenant with one final invoice of 12.00."""

    deployment: Deployment
    invoice_id: str = ""
    paid: list[str] = field(default_factory=list)

    def invoiced(self) -> "Customer":
        self.use(TOKENS)
        self.deployment.clock.advance(days=40)
        result = invoice_run.run(self.deployment.database, self.deployment.clock, ["acme"])
        (self.invoice_id,) = result.finalised
        return self

    def use(self, tokens: int) -> None:
        event = self.deployment.event(input_tokens=0, cached_tokens=0, output_tokens=tokens)
        self.deployment.record(event)
        self.deployment.rate()

    def pay(self, minor: int, name: str, invoice: bool = True) -> str:
        now = self.deployment.clock.now()
        with self.deployment.database.transaction() as session:
            made = settlement.begin_payment(
                session,
                tenant_id="acme",
                invoice_id=self.invoice_id if invoice else None,
                amount_minor=minor,
                currency="USD",
                provider="manual",
                reference=name,
                at=now,
                external_id=name,
            )
            settlement.succeed(session, made, now)
            return made.id

    def refund(self, payment_id: str, minor: int, name: str = "refund") -> str:
        with self.deployment.database.transaction() as session:
            payment = session.get_one(Payment, payment_id)
            now = self.deployment.clock.now()
            return settlement.refund(session, payment, minor, name, now).id

    def refund_fails(self, refund_id: str) -> None:
        with self.deployment.database.transaction() as session:
            record = session.get_one(Refund, refund_id)
            settlement.refund_failed(session, record, "returned", self.deployment.clock.now())

    def dispute(self, payment: str, minor: int, *, withdrawn: bool = True) -> None:
        now = self.deployment.clock.now()
        status = "open" if withdrawn else "won"
        state = DisputeState("dp_1", payment, status, minor, "USD", withdrawn, now)
        with self.deployment.database.transaction() as session:
            posting.dispute(session, "manual", state, now)

    def write_off(self) -> None:
        with self.deployment.database.transaction() as session:
            settlement.write_off(session, self.invoice_id, self.deployment.clock.now())

    def void(self) -> None:
        with self.deployment.database.transaction() as session:
            settlement.void(session, self.invoice_id, self.deployment.clock.now(), "in error")

    def note(self, minor: int, *, refund: bool = False, name: str = "note") -> CreditNote:
        with self.deployment.database.transaction() as session:
            return credit_notes.issue(
                session,
                invoice_id=self.invoice_id,
                net_minor=minor,
                reason="goodwill",
                reference=name,
                at=self.deployment.clock.now(),
                refund=refund,
            )

    @property
    def invoice(self) -> Invoice:
        with self.deployment.database.read() as session:
            return session.get_one(Invoice, self.invoice_id)

    def has(self, **dollars: str) -> None:
        """Asserts the balances, debits positive; kinds that are not named are zero."""
        asked = ("receivable", "prepaid", "cash", "bad_debt")
        with self.deployment.database.read() as session:
            found = {
                kind: ledger.balance(session, "acme", AccountKind(kind), "USD") for kind in asked
            }
        assert found == {kind: units_of(dollars.get(kind, "0")) for kind in asked}
        clean(self.deployment)


@pytest.fixture
def customer(lite: Deployment) -> Customer:
    return Customer(lite).invoiced()


def test_refunding_a_duplicate_payment_leaves_the_invoice_paid(customer: Customer) -> None:
    customer.pay(1200, "first")
    second = customer.pay(1200, "second")
    customer.has(cash="24", prepaid="-12")
    refund = customer.refund(second, 1200)
    assert customer.invoice.status == "paid"
    customer.has(cash="12")
    customer.refund_fails(refund)
    assert customer.invoice.status == "paid"
    customer.has(cash="24", prepaid="-12")


def test_an_overpayment_is_refunded_from_the_wallet_first(customer: Customer) -> None:
    payment = customer.pay(1500, "too much")
    customer.refund(payment, 300, "excess")
    assert customer.invoice.status == "paid"
    customer.has(cash="12")
    customer.refund(payment, 500, "part")
    assert (customer.invoice.status, customer.invoice.paid_minor) == ("final", 700)
    customer.has(cash="7", receivable="5")


def test_a_spent_overpayment_cannot_be_refunded_by_hand(customer: Customer) -> None:
    customer.pay(1200, "first")
    second = customer.pay(1200, "second")
    customer.use(10_000_000)  # 6.00 of the 12.00 in the wallet
    with pytest.raises(Conflict, match="600 of 1200"):
        customer.refund(second, 1200)
    customer.refund(second, 600)
    customer.has(cash="18")


def test_a_refund_at_the_provider_beyond_the_wallet_is_a_bad_debt(customer: Customer) -> None:
    customer.pay(1200, "first")
    customer.pay(1200, "second")
    customer.use(10_000_000)
    now = customer.deployment.clock.now()
    state = RefundState("re_1", "second", Status.SUCCEEDED, 1200, "USD")
    with customer.deployment.database.transaction() as session:
        posting.refund(session, "manual", state, now)
    assert customer.invoice.status == "paid"
    customer.has(cash="12", bad_debt="6")


def test_partial_refunds_over_several_payments(customer: Customer) -> None:
    first, second = customer.pay(500, "first"), customer.pay(700, "second")
    customer.refund(first, 300, "a")
    customer.refund(second, 200, "b")
    assert (customer.invoice.status, open_amounts.open_minor(customer.invoice)) == ("final", 500)
    customer.has(cash="7", receivable="5")
    with pytest.raises(Conflict, match="200 minor units can be refunded"):
        customer.refund(first, 201, "c")
    customer.refund(first, 200, "d")
    customer.has(cash="5", receivable="7")


def test_a_payment_after_a_write_off_recovers_the_bad_debt(customer: Customer) -> None:
    customer.pay(200, "part")
    customer.write_off()
    customer.has(cash="2", bad_debt="10")
    customer.pay(400, "more")
    assert customer.invoice.status == "uncollectible"
    customer.has(cash="6", bad_debt="6")
    customer.pay(900, "rest and 3.00 too much")
    assert customer.invoice.status == "paid"
    customer.has(cash="15", prepaid="-3")


def test_a_refund_of_a_part_payment_after_a_write_off_is_a_bad_debt_too(
    customer: Customer,
) -> None:
    payment = customer.pay(500, "part")
    customer.write_off()
    refund = customer.refund(payment, 500)
    assert customer.invoice.status == "uncollectible"
    customer.has(bad_debt="12")
    customer.refund_fails(refund)
    customer.has(cash="5", bad_debt="7")


def test_a_refunded_recovery_opens_the_invoice_again(customer: Customer) -> None:
    customer.write_off()
    payment = customer.pay(1200, "late")
    customer.has(cash="12")
    customer.refund(payment, 1200)
    assert customer.invoice.status == "final"
    customer.has(receivable="12")


def test_a_payment_after_a_void_is_credit_and_is_refunded_as_such(customer: Customer) -> None:
    customer.void()
    payment = customer.pay(1200, "crossed in the post")
    customer.has(cash="12", prepaid="-12")
    customer.refund(payment, 1200)
    assert (customer.invoice.status, customer.invoice.paid_minor) == ("void", 0)
    customer.has()


def test_a_dispute_after_a_refund_takes_no_more_than_the_invoice_had(customer: Customer) -> None:
    payment = customer.pay(1200, "card")
    customer.refund(payment, 400)
    customer.has(cash="8", receivable="4")
    customer.dispute("card", 1200)  # the bank withdraws the whole charge
    assert customer.invoice.paid_minor == 0
    customer.has(cash="-4", receivable="12", bad_debt="4")
    customer.dispute("card", 1200, withdrawn=False)
    assert customer.invoice.paid_minor == 800
    customer.has(cash="8", receivable="4")


@pytest.mark.parametrize("then", ["paid again", "written off", "void"])
def test_a_dispute_is_won_after_the_invoice_was_closed_otherwise(
    customer: Customer, then: str
) -> None:
    customer.pay(1200, "card")
    customer.dispute("card", 1200)
    if then == "paid again":
        customer.pay(1200, "wire")
    elif then == "written off":
        customer.write_off()
    else:
        customer.void()
    customer.dispute("card", 1200, withdrawn=False)
    if then == "paid again":
        assert customer.invoice.paid_minor == 1200
        customer.has(cash="24", prepaid="-12")
    elif then == "written off":
        assert customer.invoice.status == "paid"
        customer.has(cash="12")
    else:
        assert (customer.invoice.status, customer.invoice.paid_minor) == ("void", 0)
        customer.has(cash="12", prepaid="-12")


def _paid_from_the_wallet(lite: Deployment, units: str) -> Customer:
    with lite.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind=credits.PREPAID,
            money=Money(units_of(units)),
            reference="bought",
            at=lite.clock.now(),
        )
    return Customer(lite).invoiced()


def test_a_refunded_credit_note_on_an_invoice_paid_from_the_wallet_is_credit(
    lite: Deployment,
) -> None:
    customer = _paid_from_the_wallet(lite, "12")
    assert (customer.invoice.status, customer.invoice.due_minor) == ("paid", 0)
    assert customer.note(1200, refund=True).outcome == "balance"
    customer.has(cash="12", prepaid="-12")


def test_a_refunded_credit_note_repays_cash_before_credit(lite: Deployment) -> None:
    customer = _paid_from_the_wallet(lite, "7")
    payment = customer.pay(500, "the rest")
    assert customer.note(600, refund=True, name="one").outcome == "refund"  # 5 cash, 1 credit
    customer.has(cash="12", receivable="-5", prepaid="-1")
    assert customer.note(200, refund=True, name="two").outcome == "balance"
    customer.refund(payment, 500)
    assert open_amounts.open_minor(customer.invoice) == 0
    customer.has(cash="7", prepaid="-3")


def test_credit_notes_over_several_payments_are_refunded_from_the_invoice_not_the_wallet(
    customer: Customer,
) -> None:
    first, second = customer.pay(500, "first"), customer.pay(1000, "second")  # 3.00 too much
    customer.note(400, refund=True, name="one")
    customer.note(400, refund=True, name="two")
    customer.has(cash="15", receivable="-8", prepaid="-3")
    customer.refund(second, 500, "a")
    customer.refund(first, 300, "b")
    assert customer.invoice.status == "paid"
    customer.has(cash="7", prepaid="-3")
    customer.refund(second, 300, "c")
    customer.has(cash="4")


def test_a_note_on_an_invoice_that_was_paid_twice_and_waits(customer: Customer) -> None:
    """The open amount falls to zero by a note, a payment in flight then arrives."""
    customer.note(1200)
    assert customer.invoice.status == "paid"
    customer.deployment.clock.advance(hours=1)
    payment = customer.pay(1200, "in flight")
    customer.has(cash="12", prepaid="-12")
    customer.refund(payment, 1200)
    assert customer.invoice.status == "paid"
    customer.has()
    assert customer.deployment.clock.now() > customer.invoice.period_end + timedelta(hours=1)


def test_a_note_above_the_open_amount_lowers_it_first_and_refunds_only_the_rest(
    customer: Customer,
) -> None:
    customer.pay(700, "a part")
    assert customer.note(800, refund=True).outcome == "refund"  # 5.00 open, 3.00 back
    customer.has(cash="7", receivable="-3")
    assert open_amounts.open_minor(customer.invoice) == -300


def test_without_a_plan_an_invoice_is_due_after_two_weeks(customer: Customer) -> None:
    invoice = customer.invoice
    assert invoice.final_at is not None and invoice.due_at is not None
    assert invoice.due_at - invoice.final_at == timedelta(days=14)


def test_an_invoice_is_paid_when_the_last_cent_is(customer: Customer) -> None:
    customer.pay(1199, "all but a cent")
    assert customer.invoice.status == "final"
    customer.pay(1, "the cent")
    assert customer.invoice.status == "paid"
    customer.has(cash="12")


def test_a_refund_of_a_cent_opens_the_invoice_again(customer: Customer) -> None:
    payment = customer.pay(1200, "paid")
    customer.refund(payment, 1)
    assert (customer.invoice.status, customer.invoice.settled_at) == ("final", None)
    customer.has(cash="11.99", receivable="0.01")


def test_a_payment_in_another_currency_or_of_nothing_is_refused(lite: Deployment) -> None:
    for minor, currency, match in ((100, "EUR", "in USD, the payment in EUR"), (0, "USD", "above")):
        with pytest.raises(BadRequest, match=match), lite.database.transaction() as session:
            settlement.begin_payment(
                session,
                tenant_id="acme",
                invoice_id=None,
                amount_minor=minor,
                currency=currency,
                provider="manual",
                reference="wire",
                at=lite.clock.now(),
            )
    with pytest.raises(NotFound, match="no invoice 'inv_none'"):
        Customer(lite, "inv_none").write_off()


def test_a_dispute_takes_no_more_from_the_wallet_than_its_payment_brought(
    customer: Customer,
) -> None:
    customer.pay(1200, "first")
    second = customer.pay(1200, "second")
    customer.pay(1000, "third", invoice=False)
    customer.refund(second, 400)
    customer.has(cash="30", prepaid="-18")
    # 8.00 of the second payment are in the wallet; 4.00 of it went back before the bank took all.
    customer.dispute("second", 1200)
    customer.has(cash="18", prepaid="-10", bad_debt="4")
