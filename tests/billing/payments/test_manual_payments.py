"""Payments by hand: the provider that stands in where no Stripe key is set."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from billing.payments.base import Attempt, Charge, Gone, Refused, Status, Window
from billing.payments.manual import ManualPayments


@pytest.mark.parametrize(
    "ask",
    [
        lambda manual: manual.payment("pay_1"),
        lambda manual: manual.refund_state("re_1"),
        lambda manual: manual.dispute("dp_1"),
        lambda manual: manual.invoice("inv_1"),
    ],
)
def test_it_knows_no_object_of_a_provider(ask: Callable[[ManualPayments], object]) -> None:
    with pytest.raises(Gone):
        ask(ManualPayments())


@pytest.mark.parametrize(
    "ask",
    [
        lambda manual: manual.setup_link("acme", "https://back.example"),
        lambda manual: manual.portal_link("acme", "https://back.example"),
    ],
)
def test_it_has_no_pages_and_says_what_to_do(ask: Callable[[ManualPayments], object]) -> None:
    with pytest.raises(Refused, match="tollhouse invoice pay"):
        ask(ManualPayments())


def test_an_event_without_a_provider_is_refused_with_the_setting_that_names_one() -> None:
    with pytest.raises(Refused, match="TOLLHOUSE_STRIPE_API_KEY"):
        ManualPayments().event(b"{}", None)


def test_a_charge_waits_for_the_person_and_a_refund_does_not() -> None:
    manual, attempt = ManualPayments(), Attempt("key")
    charged = manual.charge("acme", Charge("pay_1", "acme", "USD", 1_200, "Top-up", ()), attempt)
    assert (charged.status, charged.amount_minor, charged.payment_id) == (
        Status.PENDING,
        1_200,
        "pay_1",
    )
    returned = manual.refund("pay_1", 400, "goodwill", attempt)
    assert (returned.status, returned.amount_minor) == (Status.SUCCEEDED, 400)


def test_it_has_no_records_to_be_compared() -> None:
    window = Window(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC))
    assert list(ManualPayments().records(window)) == []
