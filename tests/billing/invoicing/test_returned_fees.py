"""What becomes of an invoice whose fees were returned: nothing returns twice, whatever is done next."""

from fractions import Fraction

import pytest
from sqlalchemy import select

from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.payments import settlement
from billing.payments.tables import Payment
from core.errors import Conflict
from core.money import Money, units_of
from tests.billing.conftest import Deployment
from tests.billing.invoicing.lives import Life
from tests.billing.invoicing.test_lives import UNUSED, YEAR, cancel, subscribe

NEAR = Fraction(1, 50)


@pytest.fixture
def life(lite: Deployment) -> Life:
    return Life(lite)


def top_up(life: Life, amount: int) -> None:
    with life.change() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind="prepaid",
            money=Money(units_of(str(amount)), "USD"),
            reference=f"top-up {life.now.isoformat()}",
            at=life.now,
        )


def returned(life: Life, paid_by: str) -> str:
    """A year ahead that is paid as said, cancelled on April 10 and returned in May; its number."""
    life.plan("y", base_fee="1200", interval="year", in_advance=True)
    if paid_by == "wallet":
        top_up(life, 1200)
    subscribe(life, "y")
    life.run("2026-02-03")
    with life.read() as session:
        label = str(life.invoice(session).label)
    if paid_by == "cash":
        life.pay()
    if paid_by == "provider":  # it is collected there, and keeps its amount
        with life.change() as session:
            life.invoice(session).external_id = "in_1"
    cancel(life, "2026-04-10")
    life.run("2026-05-03")
    return label


def wallet(life: Life) -> Fraction:
    return -life.balance("prepaid")


@pytest.mark.parametrize("paid_by", ["wallet", "provider"])
def test_an_invoice_whose_fees_have_returned_is_not_voided(life: Life, paid_by: str) -> None:
    label = returned(life, paid_by)
    assert abs(wallet(life) - UNUSED) <= NEAR
    with pytest.raises(Conflict, match="have been returned") as refused:
        life.void(label)
    assert "credit note" in str(refused.value.next_step)
    life.run("2026-06-03")
    assert abs(wallet(life) - UNUSED) <= NEAR


def test_the_rest_of_a_returned_fee_is_credited_once(life: Life) -> None:
    label = returned(life, "wallet")
    rest = round((YEAR - UNUSED) * 100)
    with pytest.raises(Conflict, match="left to credit"):
        life.credit(rest + 1, label)
    life.credit(rest, label)
    life.run("2026-06-03")
    assert abs(wallet(life) - YEAR) <= NEAR
    assert abs(life.balance("revenue")) <= NEAR


def test_a_void_of_the_invoice_that_returned_a_fee_lets_it_return_again_once(life: Life) -> None:
    """It has usage of more than it returned; the usage of a void invoice is not billed again."""
    life.plan("y", base_fee="1200", interval="year", in_advance=True)
    top_up(life, 1200)
    subscribe(life, "y")
    life.run("2026-02-03")
    cancel(life, "2026-04-10")
    life.use(1000)
    life.run("2026-05-03")
    life.void()
    life.run("2026-06-03")
    assert abs(wallet(life) - UNUSED) <= NEAR
    life.run("2026-07-03")
    assert abs(wallet(life) - UNUSED) <= NEAR


def test_a_written_off_invoice_gets_back_what_was_returned_of_it(life: Life) -> None:
    label = returned(life, "provider")
    life.write_off(label)
    assert wallet(life) <= NEAR
    assert abs(life.balance("bad_debt") - (YEAR - UNUSED)) <= NEAR
    life.run("2026-06-03")
    assert wallet(life) <= NEAR


@pytest.mark.parametrize("part", [1, 2])
def test_a_refund_after_a_return_is_owed_again(life: Life, part: int) -> None:
    label = returned(life, "cash")
    with life.change() as session:
        payment = session.scalars(select(Payment)).one()
        cents = payment.amount_minor // part
        settlement.refund(session, payment, cents, "refund", life.now)
    life.run("2026-06-03")
    with life.read() as session:
        row = session.scalars(select(Invoice).where(Invoice.label == label)).one()
        assert settlement.open_minor(row) == cents
    assert abs(wallet(life) - UNUSED) <= NEAR
    life.write_off(label)  # what is left of the returned fee pays it first
    most = Fraction(cents, 100) - min(Fraction(cents, 100), UNUSED)
    assert abs(life.balance("bad_debt") - most) <= NEAR
    assert abs(wallet(life) - (UNUSED - min(Fraction(cents, 100), UNUSED))) <= NEAR
