"""Money that goes back: refunds, disputes, and the wallet that they came from."""

import pytest
from sqlalchemy import select

from billing.invoicing import open_amounts
from billing.ledger import ledger
from billing.ledger.ledger import AccountKind
from billing.payments import commands, top_ups
from billing.payments.fake_stripe import payments
from billing.payments.tables import Payment, PaymentCommand, Refund
from core.errors import Conflict
from core.money import Money, units_of
from tests.billing.payments.stripe_deployment import Till


def test_a_refund_goes_through_stripe_once(till: Till) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    (paid,) = till.payments()
    for _ in range(2):
        with till.deployment.database.transaction() as session:
            made = commands.request_refund(
                session, paid.id, 400, "goodwill", till.deployment.clock.now()
            )
            assert made.status == "pending"
    till.settle()
    with till.deployment.database.read() as session:
        assert session.get_one(Refund, made.id).status == "succeeded"
    (there,) = till.stripe.books.all("refund")
    assert (there["amount"], there["metadata"]) == (400, {"tollhouse_refund": "goodwill"})
    assert till.cash() == units_of("8") and open_amounts.open_minor(till.read(invoice.id)) == 400
    till.audited()


def test_a_refund_that_stripe_refuses_or_the_bank_returns_is_taken_back(till: Till) -> None:
    till.leave_card()
    till.settle()
    till.invoice(12)
    till.settle()
    (paid,) = till.payments()
    intent = paid.external_id
    payments.create_refund(till.stripe.books, {"payment_intent": intent, "amount": "1000"})
    with till.deployment.database.transaction() as session:  # before we hear of the other one
        commands.request_refund(session, paid.id, 400, "too much", till.deployment.clock.now())
    till.settle()
    assert till.cash() == units_of("2")
    there = till.stripe.books.all("refund")[0]
    payments.fail_refund(till.stripe.books, there["id"])
    till.settle()
    assert till.cash() == units_of("12")
    till.audited()


@pytest.mark.parametrize("outcome", ["won", "lost"])
def test_a_dispute_takes_the_money_until_it_is_decided(till: Till, outcome: str) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    (paid,) = till.payments()
    assert paid.external_id is not None
    made = payments.open_dispute(till.stripe.books, paid.external_id)
    till.settle()
    assert till.read(invoice.id).status == "final" and till.cash() == 0
    with (
        pytest.raises(Conflict, match="disputed"),
        till.deployment.database.transaction() as session,
    ):
        commands.request_refund(session, paid.id, None, "x", till.deployment.clock.now())
    payments.close_dispute(till.stripe.books, made["id"], outcome)
    till.settle()
    won = outcome == "won"
    assert till.read(invoice.id).status == ("paid" if won else "final")
    assert till.cash() == (units_of("12") if won else 0)
    till.audited()


def _topped_up(till: Till) -> Payment:
    with till.deployment.database.transaction() as session:
        top_ups.configure(session, "acme", Money(units_of("5")), Money(units_of("20")))
        (made,) = top_ups.due(session, "stripe", till.deployment.clock.now())
        commands.charge(session, made, till.deployment.clock.now())
    till.settle()
    return till.payments()[0]


def test_a_top_up_is_charged_once_and_its_dispute_beyond_the_wallet_is_our_loss(
    till: Till,
) -> None:
    till.leave_card()
    till.settle()
    paid = _topped_up(till)
    assert paid.status == "succeeded" and paid.external_id is not None
    till.deployment.record(
        till.deployment.event(output_tokens=25_000_000, input_tokens=0, cached_tokens=0)
    )
    till.deployment.rate()  # 15 of the 20 are spent
    made = payments.open_dispute(till.stripe.books, paid.external_id)
    till.settle()

    def _balances() -> tuple[int, int, int]:
        with till.deployment.database.read() as session:
            kinds = (AccountKind.CASH, AccountKind.BAD_DEBT, AccountKind.PREPAID)
            a, b, c = (ledger.balance(session, "acme", kind, "USD") for kind in kinds)
            return a, b, c

    assert _balances() == (0, units_of("15"), 0)
    till.audited()
    payments.close_dispute(till.stripe.books, made["id"], "won")
    till.settle()
    assert _balances() == (units_of("20"), 0, -units_of("5"))
    till.audited()


def test_a_refused_top_up_turns_the_rule_off_with_the_reason(till: Till) -> None:
    till.leave_card("9995")
    till.settle()
    paid = _topped_up(till)
    assert paid.status == "failed" and "insufficient funds" in (paid.failure or "")


def test_a_refund_of_a_payment_whose_id_at_stripe_is_lost_is_put_aside_with_the_reason(
    till: Till,
) -> None:
    till.leave_card()
    till.settle()
    till.invoice(12)
    till.settle()
    (paid,) = till.payments()
    with till.deployment.database.transaction() as session:
        commands.request_refund(session, paid.id, 400, "goodwill", till.deployment.clock.now())
        session.get_one(Payment, paid.id).external_id = None
    pushed = till.push()
    assert (pushed.done, pushed.later, pushed.refused) == (0, 0, 1)
    with till.deployment.database.read() as session:
        (command,) = session.scalars(select(PaymentCommand).where(PaymentCommand.kind == "refund"))
    assert command.failed
    assert command.last_error == "The payment has no id at the provider."
    assert till.stripe.books.all("refund") == []
