"""What Stripe is asked, to the field, and what its answers mean: with answers that are written here."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import stripe

from billing.payments.base import (
    Attempt,
    Charge,
    DisputeState,
    Gone,
    PaymentState,
    RefundState,
    Refused,
    Status,
    TryLater,
    UsageReport,
    Window,
)
from billing.payments.stripe import meters, payments, records
from billing.payments.stripe.client import ask, check_base
from core.errors import SettingError
from tests.billing.payments.stripe_wire import AT, INTENT, INVOICE, START, Wire, page, refusal


@pytest.mark.parametrize(
    ("changes", "status", "amount", "failure", "in_process"),
    [
        ({}, "succeeded", 650, "", False),
        ({"amount_received": 0}, "succeeded", 700, "", False),
        ({"last_payment_error": {"message": "no"}}, "succeeded", 650, "", False),
        ({"status": "processing"}, "pending", 700, "", True),
        ({"status": "requires_payment_method"}, "pending", 700, "", False),
        (
            {
                "status": "requires_payment_method",
                "last_payment_error": {"message": "no", "code": "c"},
            },
            "failed",
            700,
            "no",
            False,
        ),
        (
            {
                "status": "requires_payment_method",
                "last_payment_error": {"message": None, "code": "c"},
            },
            "failed",
            700,
            "c",
            False,
        ),
        ({"status": "canceled"}, "failed", 700, "canceled", False),
        (
            {"status": "canceled", "last_payment_error": {"message": None, "code": None}},
            "failed",
            700,
            "refused",
            False,
        ),
        (
            {"status": "requires_action", "last_payment_error": {"message": "no", "code": None}},
            "pending",
            700,
            "no",
            False,
        ),
    ],
)
def test_the_state_of_a_payment(
    changes: dict[str, Any], status: str, amount: int, failure: str, in_process: bool
) -> None:
    wire = Wire({"GET payment_intents/pi_1": INTENT | changes})
    found = payments.payment_state(ask(lambda: wire.client().v1.payment_intents.retrieve("pi_1")))
    expected = PaymentState(
        "pi_1", Status(status), amount, "USD", failure, "pay_1", in_process, START
    )
    assert found == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("succeeded", "succeeded"),
        ("failed", "failed"),
        ("canceled", "failed"),
        ("pending", "pending"),
        ("requires_action", "pending"),
    ],
)
def test_the_state_of_a_refund(theirs: str, ours: str) -> None:
    plain = {"object": "refund", "id": "re_1", "amount": 5, "currency": "eur", "created": AT}
    made = plain | {
        "status": theirs,
        "payment_intent": "pi_1",
        "metadata": {"tollhouse_refund": "r"},
    }
    wire = Wire({"GET refunds": [made, plain | {"status": theirs, "payment_intent": None}]})
    read = [payments.refund_state(wire.client().v1.refunds.retrieve("re_1")) for _ in range(2)]
    full = RefundState("re_1", "pi_1", Status(ours), 5, "EUR", "r", "", START)
    assert read == [full, replace(full, payment_external_id="", reference="")]


@pytest.mark.parametrize(
    ("theirs", "ours", "withdrawn"),
    [
        ("needs_response", "open", True),
        ("under_review", "open", True),
        ("won", "won", False),
        ("lost", "lost", True),
        ("prevented", "prevented", False),
        ("warning_needs_response", "warning_needs_response", False),
        ("warning_under_review", "warning_under_review", False),
        ("warning_closed", "warning_closed", False),
    ],
)
def test_the_state_of_a_dispute(theirs: str, ours: str, withdrawn: bool) -> None:
    made = {"object": "dispute", "id": "dp_1", "amount": 5, "currency": "usd", "created": AT}
    wire = Wire({"GET disputes": made | {"status": theirs, "payment_intent": INTENT}})
    found = payments.dispute_state(wire.client().v1.disputes.retrieve("dp_1"))
    assert found == DisputeState("dp_1", "pi_1", ours, 5, "USD", withdrawn, START)


WANTED = Charge("pay_1", "acme", "USD", 700, "Top-up", ("customer_balance", "card"))


def _charging(**more: Any) -> Wire:
    settings = {"default_payment_method": "pm_1"}
    customer = {"object": "customer", "id": "cus_1", "invoice_settings": settings}
    method = {"object": "payment_method", "id": "pm_1", "type": "card", "created": 1}
    return Wire(
        {
            "GET customers/cus_1/payment_methods": page(method),
            "GET customers/cus_1": customer,
            "POST payment_intents": INTENT,
            **more,
        }
    )


def test_a_charge_of_the_default_method() -> None:
    wire, attempt = _charging(), Attempt("c")
    made = payments.charge(wire.client(), "cus_1", WANTED, attempt)
    assert made == PaymentState("pi_1", Status.SUCCEEDED, 650, "USD", "", "pay_1", False, START)
    assert wire.forms("POST payment_intents") == [
        {
            "amount": "700",
            "currency": "usd",
            "customer": "cus_1",
            "payment_method": "pm_1",
            "off_session": "true",
            "confirm": "true",
            "description": "Top-up",
            "metadata[tollhouse_payment]": "pay_1",
            "metadata[tollhouse_tenant]": "acme",
            "payment_method_types[0]": "card",
        }
    ]
    assert (attempt.progress, wire.calls[-1].key) == ({"method": "pm_1"}, "c:charge")
    wire = Wire({"POST payment_intents": INTENT})
    payments.charge(wire.client(), "cus_1", replace(WANTED, methods=()), attempt)
    assert "payment_method_types[0]" not in wire.calls[0].form, "and its method is kept"


def test_a_charge_that_is_declined_or_has_no_method() -> None:
    failed = PaymentState("", Status.FAILED, 700, "USD", "declined", "pay_1")
    declined = refusal(402, "declined", "card_error", payment_intent=INTENT)
    wire = _charging(**{"POST payment_intents": [declined, refusal(402, "", "card_error")]})
    made = [payments.charge(wire.client(), "cus_1", WANTED, Attempt("c")) for _ in range(2)]
    assert made[0] == replace(failed, external_id="pi_1")
    assert made[1].external_id == "" and made[1].failure
    none = _charging(**{"GET customers/cus_1/payment_methods": page()})
    none.answers["GET customers/cus_1"] = {
        "object": "customer",
        "id": "c",
        "invoice_settings": None,
    }
    why = "There is no payment method to charge."
    assert payments.charge(none.client(), "cus_1", WANTED, Attempt("c")) == replace(
        failed, failure=why
    )


def test_a_charge_and_a_refund_that_were_made_before_are_found() -> None:
    other = INTENT | {"id": "pi_0", "metadata": {}}
    wire = Wire({"GET payment_intents": page(other, INTENT)})
    again = Attempt("c", again=True)
    assert payments.charge(wire.client(), "cus_1", WANTED, again).external_id == "pi_1"
    assert wire.calls[0].form == {"customer": "cus_1", "limit": "100"} and len(wire.calls) == 1
    plain = {
        "object": "refund",
        "status": "succeeded",
        "amount": 5,
        "currency": "usd",
        "created": AT,
    }
    theirs = plain | {"id": "re_0", "payment_intent": "pi_1", "metadata": {"tollhouse_refund": "o"}}
    ours = theirs | {"id": "re_1", "metadata": {"tollhouse_refund": "r"}}
    wire = Wire({"GET refunds": page(theirs, ours), "POST refunds": ours})
    found = payments.refund(wire.client(), "pi_1", 5, "r", Attempt("r", again=True))
    assert (found.external_id, wire.made()) == ("re_1", [("GET", "refunds")])
    assert wire.calls[0].form == {"payment_intent": "pi_1", "limit": "100"}
    payments.refund(wire.client(), "pi_1", 5, "r", Attempt("r"))
    made = wire.calls[-1]
    assert (made.method, made.key) == ("POST", "r:refund")
    assert made.form == {"payment_intent": "pi_1", "amount": "5", "metadata[tollhouse_refund]": "r"}


def test_usage_that_was_delivered_before_counts() -> None:
    report = UsageReport("u1", "tokens", "cus_1", 7, START)
    event = {"object": "billing.meter_event"}
    known = refusal(400, "An event already exists with identifier u1.")
    coded = refusal(400, "x", code="duplicate_meter_event")
    wire = Wire(
        {"POST billing/meter_events": [event, known, coded, refusal(400, "no"), refusal(404)]}
    )
    for _ in range(3):
        meters.report(wire.client(), report)
    assert wire.calls[0].form == {
        "event_name": "tokens",
        "identifier": "u1",
        "timestamp": str(AT),
        "payload[stripe_customer_id]": "cus_1",
        "payload[value]": "7",
    }
    for kind in (Refused, Gone):
        with pytest.raises(kind):
            meters.report(wire.client(), report)


@pytest.mark.parametrize(
    ("answer", "kind", "after"),
    [
        (refusal(429, type_="invalid_request_error"), TryLater, None),
        ((429, {"error": {"message": "m"}}, {"retry-after": "7"}), TryLater, 7.0),
        ((503, {"error": {"message": "m"}}, {"retry-after": "soon"}), TryLater, None),
        ((500, {"error": {"message": "m"}}, {"retry-after": "2.5"}), TryLater, 2.5),
        (refusal(401), TryLater, 300.0),
        (refusal(403), TryLater, 300.0),
        (refusal(409, type_="idempotency_error"), TryLater, None),
        (refusal(400, type_="idempotency_error"), Refused, None),
        (refusal(400), Refused, None),
        (refusal(404), Gone, None),
        (stripe.APIConnectionError("away"), TryLater, None),
    ],
)
def test_what_an_error_of_stripe_means(
    answer: Any, kind: type[Exception], after: float | None
) -> None:
    wire = Wire({"GET refunds": answer})
    with pytest.raises(kind) as told:
        ask(lambda: wire.client().v1.refunds.retrieve("re_1"))
    assert type(told.value) is kind
    assert getattr(told.value, "after_s", None) == after


def test_a_card_error_is_passed_on_and_a_message_is_cut() -> None:
    wire = Wire({"GET refunds": [refusal(402, type_="card_error"), refusal(400, "m" * 401)]})
    with pytest.raises(stripe.CardError):
        ask(lambda: wire.client().v1.refunds.retrieve("re_1"))
    with pytest.raises(Refused) as told:
        ask(lambda: wire.client().v1.refunds.retrieve("re_1"))
    assert str(told.value) == "m" * 400


@pytest.mark.parametrize(
    ("status", "again", "replayed", "turns"),
    [
        (500, True, "true", 1),
        (499, True, "true", None),
        (500, False, "true", None),
        (500, True, "false", None),
        (429, True, "true", None),
    ],
)
def test_a_stored_error_is_asked_for_under_a_new_key(
    status: int, again: bool, replayed: str, turns: int | None
) -> None:
    answer: Any = (status, {"error": {"message": "m"}}, {"idempotent-replayed": replayed})
    wire = Wire({"POST refunds": answer, "GET refunds": page()})
    attempt = Attempt("r", again=again)
    with pytest.raises(TryLater):
        payments.refund(wire.client(), "pi_1", 5, "r", attempt)
    assert attempt.progress.get("turn:refund") == turns


def test_records_of_a_window_page_by_page() -> None:
    refund = {
        "object": "refund",
        "id": "re_1",
        "status": "succeeded",
        "amount": 5,
        "currency": "usd",
    }
    refund |= {"created": AT, "payment_intent": "pi_1"}
    dispute = refund | {"object": "dispute", "id": "dp_1", "status": "won"}
    second = INVOICE | {"id": "in_2"}
    wire = Wire(
        {
            "GET invoices": [page(INVOICE, more=True), page(second)],
            "GET x": page(second),
            "GET payment_intents": page(INTENT),
            "GET refunds": page(refund),
            "GET disputes": page(dispute),
        }
    )
    found = list(records.records(wire.client(), Window(START, START + timedelta(days=1))))
    assert [each.external_id for each in found] == ["in_1", "in_2", "pi_1", "re_1", "dp_1"]
    made = {"limit": "100", "created[gte]": str(AT), "created[lt]": str(AT + 86_400)}
    assert wire.forms("GET payment_intents") == [made]
    assert wire.forms("GET invoices")[0] == made | {"expand[0]": "data.payments"}


def test_an_address_of_stripe_s_api() -> None:
    assert check_base("https://host:8443/") == "https://host:8443"
    for wrong in (
        "https://host:0",
        "host",
        "https://",
        "https://h?x",
        "https://h#x",
        "https://h:x",
    ):
        with pytest.raises(SettingError, match="which is not an http"):
            check_base(wrong)
    with pytest.raises(SettingError) as told:
        check_base("x" * 90)
    assert f"'{'x' * 80}'" in str(told.value)
