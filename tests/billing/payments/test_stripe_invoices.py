"""Invoices at Stripe: what it is asked, to the field, and what answers mean that are written here."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from billing.payments.base import (
    Attempt,
    Bill,
    BillLine,
    InvoiceState,
    PaymentState,
    Refused,
    Status,
    Transfer,
)
from billing.payments.stripe import invoices
from tests.billing.payments.stripe_wire import AT, INTENT, INVOICE, START, Wire, page, refusal

OPEN = InvoiceState("in_1", "inv_1", "open", "USD", 1000, 900, (), "https://pay", START)
LINES = tuple(BillLine(n, f"line {n}", 1, START, START + timedelta(days=1)) for n in range(1, 202))
BILL = Bill("inv_1", "TH-000001", "acme", "USD", 1000, LINES[:1])


def _paid(name: str, status: str, amount: int | None = 100) -> dict[str, Any]:
    payment = {"type": "payment_intent", "payment_intent": name}
    return {
        "object": "invoice_payment",
        "status": status,
        "amount_paid": amount,
        "payment": payment,
    }


def test_the_state_of_an_invoice_and_of_its_attempts() -> None:
    parts = page(
        _paid("pi_a", "paid"),
        _paid("pi_b", "paid", None),
        _paid("pi_bad", "open"),
        _paid("pi_wait", "open"),
        _paid("pi_new", "open"),
        _paid("pi_gone", "canceled"),
        {"object": "invoice_payment", "status": "paid", "payment": {"payment_intent": None}},
    )
    bad = {"status": "requires_payment_method", "last_payment_error": {"message": "no"}}
    wire = Wire(
        {
            "GET invoices/in_1": INVOICE | {"payments": parts},
            "GET payment_intents/pi_bad": INTENT | bad | {"id": "pi_bad"},
            "GET payment_intents/pi_wait": INTENT | {"status": "processing", "id": "pi_wait"},
            "GET payment_intents/pi_new": INTENT | {"status": "requires_confirmation"},
        }
    )
    found = invoices.state(wire.client(), "in_1")
    paid = PaymentState("pi_a", Status.SUCCEEDED, 100, "USD")
    failed = PaymentState("pi_bad", Status.FAILED, 700, "USD", "no", "pay_1", False, START)
    waits = PaymentState("pi_wait", Status.PENDING, 700, "USD", "", "pay_1", True, START)
    known = (paid, replace(paid, external_id="pi_b", amount_minor=0))
    assert found == replace(OPEN, payments=(*known, failed, waits))
    assert wire.calls[0].form == {"expand[0]": "payments"}
    assert len(wire.calls) == 4, "no other is asked for"
    wire.answers["GET invoices/in_1"] = INVOICE | {"payments": parts, "attempt_count": 0}
    assert invoices.state(wire.client(), "in_1").payments == known
    bare = {"status": "draft", "metadata": {}, "payments": None, "hosted_invoice_url": None}
    wire.answers["GET invoices/in_1"] = INVOICE | bare
    draft = InvoiceState("in_1", "", "draft", "USD", 1000, 0, (), "", START)
    assert invoices.state(wire.client(), "in_1") == draft


def _sending(**more: Any) -> Wire:
    customer = {"object": "customer", "id": "cus_1", "invoice_settings": None}
    draft = INVOICE | {"status": "draft"}
    return Wire(
        {
            "POST invoices": INVOICE,
            "POST invoices/in_1/add_lines": INVOICE,
            "POST invoices/in_1/finalize": INVOICE,
            "GET invoices/in_1": [draft, draft, INVOICE],
            "GET customers/cus_1/payment_methods": page(),
            "GET customers/cus_1": customer,
            **more,
        }
    )


def test_an_invoice_is_created_filled_and_finalised() -> None:
    wire, kept = _sending(), Attempt("invoice:1")
    bill = replace(BILL, lines=LINES)
    assert invoices.send(wire.client(), "cus_1", bill, kept, advance=False) == OPEN
    steps = [(each.path, each.key) for each in wire.calls if each.method == "POST"]
    assert steps == [
        ("invoices", "invoice:1:invoice"),
        ("invoices/in_1/add_lines", "invoice:1:lines0"),
        ("invoices/in_1/add_lines", "invoice:1:lines100"),
        ("invoices/in_1/add_lines", "invoice:1:lines200"),
        ("invoices/in_1/finalize", "invoice:1:finalise"),
    ]
    assert wire.forms("POST invoices")[0] == {
        "customer": "cus_1",
        "currency": "usd",
        "collection_method": "charge_automatically",
        "auto_advance": "false",
        "pending_invoice_items_behavior": "exclude",
        "number": "TH-000001",
        "metadata[tollhouse_invoice]": "inv_1",
        "metadata[tollhouse_tenant]": "acme",
    }
    first, _, last = wire.forms("POST invoices/in_1/add_lines")
    assert len(first) == 500 and last == {
        "lines[0][amount]": "1",
        "lines[0][description]": "line 201",
        "lines[0][period][start]": str(AT),
        "lines[0][period][end]": str(AT + 86_400),
        "lines[0][metadata][tollhouse_line]": "201",
    }
    assert wire.forms("POST invoices/in_1/finalize") == [{"auto_advance": "false"}]
    assert kept.progress == {"invoice": "in_1"}


def test_methods_and_a_transfer_of_an_invoice_and_smart_retries() -> None:
    wire = _sending()
    bill = replace(BILL, methods=("card", "customer_balance"), days_to_pay=14)
    bill = replace(bill, transfer=Transfer("EUR", "DE"))
    bill = replace(bill, lines=(replace(LINES[0], description="d" * 501),))
    invoices.send(wire.client(), "cus_1", bill, Attempt("a"), advance=True)
    form = wire.forms("POST invoices")[0]
    funding = "payment_settings[payment_method_options][customer_balance]"
    assert {name: value for name, value in form.items() if "metadata" not in name} == {
        "customer": "cus_1",
        "currency": "usd",
        "collection_method": "send_invoice",
        "days_until_due": "14",
        "auto_advance": "true",
        "pending_invoice_items_behavior": "exclude",
        "number": "TH-000001",
        "payment_settings[payment_method_types][0]": "card",
        "payment_settings[payment_method_types][1]": "customer_balance",
        f"{funding}[funding_type]": "bank_transfer",
        f"{funding}[bank_transfer][type]": "eu_bank_transfer",
        f"{funding}[bank_transfer][eu_bank_transfer][country]": "DE",
    }
    (lines,) = wire.forms("POST invoices/in_1/add_lines")
    assert lines["lines[0][description]"] == "d" * 500
    assert wire.forms("POST invoices/in_1/finalize") == [{"auto_advance": "true"}]


def test_a_retry_looks_for_what_is_there_before_it_acts() -> None:
    other = INVOICE | {"id": "in_0", "metadata": {"tollhouse_invoice": "inv_0"}}
    void = INVOICE | {"id": "in_v", "status": "void"}
    there = {"object": "line_item", "id": "il_1", "metadata": {"tollhouse_line": "1"}}
    wire = _sending(
        **{
            "GET invoices": page(other, void, INVOICE),
            "GET invoices/in_1/lines": page(there, {"object": "line_item", "id": "il_2"}),
        }
    )
    again = Attempt("a", again=True)
    bill = replace(BILL, lines=LINES[:150])
    assert invoices.send(wire.client(), "cus_1", bill, again, advance=False) == OPEN
    posted = [each.key for each in wire.calls if each.method == "POST"]
    assert posted == ["a:lines100", "a:finalise"]
    assert wire.calls[0].form == {"customer": "cus_1", "limit": "100"}
    done = Wire({"GET invoices/in_1": INVOICE})
    known = Attempt("a", again=True, progress={"invoice": "in_1"})
    assert invoices.send(done.client(), "cus_1", BILL, known, advance=False) == OPEN
    assert done.made() == [("GET", "invoices/in_1")] * 2


def test_a_total_that_is_not_ours_stays_a_draft() -> None:
    wire = _sending()
    said = "Stripe's total of invoice TH-000001 is 1000 minor units, ours is 1001"
    with pytest.raises(Refused, match=said):
        wrong = replace(BILL, due_minor=1001)
        invoices.send(wire.client(), "cus_1", wrong, Attempt("a"), advance=False)
    assert wire.forms("POST invoices/in_1/finalize") == []


def test_an_open_invoice_is_collected_once() -> None:
    paid = INVOICE | {"status": "paid"}
    wire = Wire({"GET invoices/in_1": [INVOICE, paid], "POST invoices/in_1/pay": paid})
    assert invoices.collect(wire.client(), "in_1", Attempt("c")).status == "paid"
    assert wire.calls[1].form == {"off_session": "true"} and wire.calls[1].key == "c:pay"
    closed = Wire({"GET invoices/in_1": paid})
    assert invoices.collect(closed.client(), "in_1", Attempt("c")).status == "paid"
    assert len(closed.calls) == 1
    for answer in (refusal(402, type_="card_error"), refusal(400)):
        declined = Wire({"GET invoices/in_1": INVOICE, "POST invoices/in_1/pay": answer})
        attempt = Attempt("c")
        assert invoices.collect(declined.client(), "in_1", attempt) == OPEN
        assert attempt.progress == {"tried": True}
        assert invoices.collect(declined.client(), "in_1", attempt) == OPEN
        assert len(declined.forms("POST")) == 1


def test_a_credit_note_lowers_what_is_left_once() -> None:
    wire = Wire({"GET invoices/in_1": INVOICE, "POST credit_notes": {"object": "credit_note"}})
    attempt = Attempt("l")
    invoices.lower(wire.client(), "in_1", 1200, "r" * 201, attempt)
    (form,) = wire.forms("POST credit_notes")
    assert form == {
        "invoice": "in_1",
        "lines[0][type]": "custom_line_item",
        "lines[0][description]": "r" * 200,
        "lines[0][quantity]": "1",
        "lines[0][unit_amount]": "900",
        "memo": "r" * 200,
        "metadata[tollhouse_note]": "l",
    }
    assert (attempt.progress, wire.calls[1].key) == ({"amount": 900}, "l:lower")
    attempt.again = True
    wire.answers["GET credit_notes"] = page({"object": "credit_note", "metadata": {}})
    invoices.lower(wire.client(), "in_1", 5, "", attempt)
    (_, second) = wire.forms("POST credit_notes")
    assert (second["lines[0][unit_amount]"], second["lines[0][description]"]) == ("900", "credit")
    note = {"object": "credit_note", "metadata": {"tollhouse_note": "l"}}
    wire.answers["GET credit_notes"] = page(note)
    invoices.lower(wire.client(), "in_1", 5, "", attempt)
    assert wire.forms("GET credit_notes")[0] == {"invoice": "in_1", "limit": "100"}
    wire.answers["GET invoices/in_1"] = INVOICE | {"status": "paid"}
    invoices.lower(wire.client(), "in_1", 5, "", Attempt("m"))
    wire.answers["GET invoices/in_1"] = INVOICE
    invoices.lower(wire.client(), "in_1", 0, "", Attempt("n"))
    assert len(wire.forms("POST credit_notes")) == 2
    invoices.lower(wire.client(), "in_1", 1, "", Attempt("o"))
    assert len(wire.forms("POST credit_notes")) == 3


@pytest.mark.parametrize(
    ("how", "path", "form"),
    [
        ("void", "void", {}),
        ("uncollectible", "mark_uncollectible", {}),
        ("paid_elsewhere", "pay", {"paid_out_of_band": "true"}),
    ],
)
def test_how_an_invoice_is_closed(how: str, path: str, form: dict[str, str]) -> None:
    wire = Wire({"GET invoices/in_1": INVOICE, "POST invoices/in_1/": INVOICE})
    invoices.close(wire.client(), "in_1", how, Attempt("x"))
    (call,) = [each for each in wire.calls if each.method == "POST"]
    assert (call.path, call.form) == (f"invoices/in_1/{path}", form)
    lost = INVOICE | {"status": "uncollectible"}
    for state, acts in ((INVOICE | {"status": "paid"}, False), (lost, how != "uncollectible")):
        closed = Wire({"GET invoices/in_1": state, "POST invoices/in_1/": state})
        invoices.close(closed.client(), "in_1", how, Attempt("x"))
        assert bool(closed.forms("POST")) is acts
