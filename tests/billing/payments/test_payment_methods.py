"""Payment methods whose banks answer days later, at the fake Stripe: direct debits and transfers.

The invoice of each test is 12.00 (20 million output tokens at 0.60 a million).
"""

import pytest
from sqlalchemy import select

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.adjustments import account_changes
from billing.payments import dunning, methods
from billing.payments.base import Attempt, Charge, Status
from billing.payments.fake_stripe import debits
from billing.payments.fake_stripe.customers import leave_debit
from billing.payments.fake_stripe.webhooks import shuffled
from billing.payments.tables import DunningCase, PaymentMethod
from billing.payments.views import describe_method
from core.errors import BadRequest
from core.money import units_of
from tests.billing.payments.stripe_deployment import Till


def choose(till: Till, *chosen: str, **more: object) -> None:
    with till.deployment.database.transaction() as session:
        account = lock_account(session, "acme")
        now = till.deployment.clock.now()
        account.currency = str(more.pop("currency", account.currency))
        changes = {"payment_methods": list(chosen), "collection": "stripe", **more}
        account_changes.change(session, account, changes, now)


def sent(till: Till) -> dict:
    (invoice,) = till.stripe.books.all("invoice")
    return invoice


def cases(till: Till) -> int:
    with till.deployment.database.read() as session:
        return session.query(DunningCase).filter(DunningCase.closed_at.is_(None)).count()


def in_process(till: Till) -> str:
    """An invoice of 12.00 whose debit is processing; returns our invoice's id."""
    choose(till, "card", "us_bank_account")
    leave_debit(till.stripe.books, till.customer())
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    assert [each.status for each in till.payments()] == ["pending"]
    assert till.read(invoice.id).status == "final" and till.cash() == 0
    return invoice.id


def test_methods_reach_stripe_as_its_api_takes_them(till: Till) -> None:
    in_process(till)
    assert sent(till)["payment_settings"]["payment_method_types"] == ["card", "us_bank_account"]
    assert sent(till)["collection_method"] == "charge_automatically"


def test_a_debit_is_booked_when_the_bank_answers_and_once(both: Till) -> None:
    invoice_id = in_process(both)
    both.deployment.clock.advance(days=5)
    (intent,) = both.stripe.books.all("payment_intent")
    debits.answer(both.stripe.books, intent["id"])
    both.bring(shuffled(both.stripe.books.events, seed=3, copies=2))  # doubled, and out of order
    both.settle()
    assert both.read(invoice_id).status == "paid" and both.cash() == units_of("12")
    assert [each.status for each in both.payments()] == ["succeeded"]
    both.audited()


def test_a_late_failure_leaves_the_invoice_open_and_the_next_try_pays(till: Till) -> None:
    invoice_id = in_process(till)
    till.deployment.clock.advance(days=5)
    (intent,) = till.stripe.books.all("payment_intent")
    debits.answer(till.stripe.books, intent["id"], "The account has insufficient funds.")
    till.settle()
    (payment,) = till.payments()
    assert payment.status == "failed" and "insufficient funds" in (payment.failure or "")
    assert till.read(invoice_id).status == "final" and till.cash() == 0
    database, clock = till.deployment.database, till.deployment.clock
    dunning.run(database, clock, till.provider)
    assert cases(till) == 1
    clock.advance(days=3)
    dunning.run(database, clock, till.provider)  # the second reminder tries again
    till.settle()
    assert [each.status for each in till.payments()] == ["pending"]
    debits.answer(till.stripe.books, intent["id"])
    till.settle()
    assert till.read(invoice_id).status == "paid" and till.cash() == units_of("12")
    dunning.settle(database, clock)
    assert cases(till) == 0
    till.audited()


def test_nobody_is_reminded_while_a_bank_is_to_answer(till: Till) -> None:
    in_process(till)
    till.deployment.clock.advance(days=15)  # past the due date
    dunning.run(till.deployment.database, till.deployment.clock, till.provider)
    assert cases(till) == 0
    till.deployment.clock.advance(days=7)  # longer than any debit takes
    dunning.run(till.deployment.database, till.deployment.clock, till.provider)
    assert cases(till) == 1


def test_a_transfer_to_the_virtual_account_pays_the_invoice(till: Till) -> None:
    choose(till, "customer_balance")
    customer, invoice = till.customer(), till.invoice(12)
    till.settle()
    assert sent(till)["collection_method"] == "send_invoice"
    settings = sent(till)["payment_settings"]
    assert settings["payment_method_types"] == ["customer_balance"]
    assert settings["payment_method_options"]["customer_balance"] == {
        "funding_type": "bank_transfer",
        "bank_transfer": {"type": "us_bank_transfer"},
    }
    assert debits.receive(till.stripe.books, customer, 500) == 500
    till.settle()
    assert till.read(invoice.id).status == "final" and till.cash() == 0
    assert debits.receive(till.stripe.books, customer, 800) == 100, "1,300 less 1,200"
    till.settle()
    assert till.read(invoice.id).status == "paid" and till.cash() == units_of("12")
    till.audited()


def test_the_virtual_account_is_shown_with_its_country(till: Till) -> None:
    from billing.payments.base import Transfer

    euros = till.provider.bank_instructions(till.customer(), Transfer("EUR", "DE"))
    assert dict(euros.rows)["IBAN"].startswith("DE00") and euros.currency == "EUR"
    dollars = till.provider.bank_instructions(till.customer(), Transfer("USD", "IE"))
    assert dict(dollars.rows)["Routing number"] == "110000000"


def test_a_top_up_by_debit_waits_for_the_bank(till: Till) -> None:
    customer = till.customer()
    leave_debit(till.stripe.books, customer)
    wanted = Charge("pay_1", "acme", "USD", 2500, "Top-up", ("us_bank_account",))
    made = till.provider.charge(customer, wanted, Attempt("charge:1"))
    assert made.status is Status.PENDING and made.in_process
    debits.answer(till.stripe.books, made.external_id, "The account is closed.")
    late = till.provider.payment(made.external_id)
    assert late.status is Status.FAILED and late.failure == "The account is closed."


@pytest.mark.parametrize(
    ("chosen", "currency", "problem"),
    [
        (["cash"], "USD", "no payment method 'cash'"),
        (["sepa_debit"], "USD", "takes EUR, and the account is in USD"),
        (["us_bank_account"], "EUR", "takes USD"),
        (["customer_balance"], "CHF", "takes USD and EUR and GBP and JPY"),
    ],
)
def test_what_a_currency_does_not_take_is_refused(
    chosen: list[str], currency: str, problem: str
) -> None:
    with pytest.raises(BadRequest, match=problem):
        methods.checked(chosen, currency)


def test_methods_are_kept_in_one_order_and_empty_is_stripe_s_choice(till: Till) -> None:
    assert methods.checked(["customer_balance", "card", "card"], "USD") == [
        "card",
        "customer_balance",
    ]
    assert methods.checked([], "USD") is None
    assert methods.saved(("customer_balance",)) == ("card",)
    assert methods.euro_country("DE") == "DE" and methods.euro_country("US-NY") == "IE"
    choose(till, "card")
    with till.deployment.database.read() as session:
        assert session.get_one(BillingAccount, "acme").payment_methods == ["card"]


def test_the_card_that_is_charged_is_shown_as_the_default(till: Till) -> None:
    till.leave_card("4242")
    till.settle()
    till.leave_card("1881")
    till.settle()
    with till.deployment.database.read() as session:
        found = session.scalars(select(PaymentMethod).order_by(PaymentMethod.label)).all()
        views = [describe_method(session, each) for each in found]
    shown = {each["label"]: each["default"] for each in views}
    theirs = {each.label: each.is_default for each in till.provider.methods(till.customer())}
    assert shown == theirs and sorted(shown.values()) == [False, True]
