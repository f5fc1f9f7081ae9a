"""The Stripe that ships with the product has the shapes of the real one, and breaks as it does."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from billing.payments.base import Attempt, Bill, BillLine, Customer, Refused, TryLater
from billing.payments.fake_stripe import payments
from billing.payments.fake_stripe.customers import leave_card
from billing.payments.fake_stripe.faults import Fault
from billing.payments.fake_stripe.forms import decode
from billing.payments.fake_stripe.server import FakeStripe
from billing.payments.fake_stripe.webhooks import shuffled
from billing.payments.stripe.client import make_client
from billing.payments.stripe.provider import StripePayments
from core.clock import FakeClock
from core.errors import SettingError
from tests.conftest import SPECS

KINDS = (
    "customer",
    "payment_method",
    "setup_intent",
    "checkout.session",
    "invoice",
    "line_item",
    "invoice_payment",
    "payment_intent",
    "charge",
    "refund",
    "dispute",
    "credit_note",
    "event",
)
STEPS = {
    "create": "POST /v1/invoices$",
    "lines": "POST .*/add_lines",
    "finalise": "POST .*/finalize",
    "pay": "POST .*/pay",
    "look": "GET /v1/invoices/in_",
}


@pytest.fixture
def fake() -> Iterator[FakeStripe]:
    with FakeStripe() as made:
        yield made


@pytest.fixture
def provider(fake: FakeStripe) -> StripePayments:
    return StripePayments(fake.api_key, api_base=fake.url, webhook_secret="whsec_test")


def _bill() -> Bill:
    now = FakeClock().now()
    lines = tuple(BillLine(at, f"line {at}", 500, now, now) for at in (1, 2))
    return Bill("inv_1", "TH-000001", "acme", "USD", 1000, lines)


def _lived(fake: FakeStripe, provider: StripePayments) -> None:
    """One of everything."""
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    provider.setup_link(customer, "https://acme.invalid")
    leave_card(fake.books, customer)
    sent = provider.send_invoice(customer, _bill(), Attempt("invoice"))
    provider.lower_invoice(sent.external_id, 100, "outage", Attempt("note"))
    paid = provider.collect_invoice(sent.external_id, Attempt("collect")).payments[0]
    provider.refund(paid.external_id, 100, "ref", Attempt("refund"))
    payments.open_dispute(fake.books, paid.external_id)


def test_objects_have_the_fields_and_types_of_stripe_s(
    fake: FakeStripe, provider: StripePayments
) -> None:
    fixtures = SPECS / "stripe-fixtures3.json"
    if not fixtures.is_file():
        pytest.skip(f"{fixtures} is not there; TOLLHOUSE_SPECS_DIR names the folder that has it")
    _lived(fake, provider)
    wanted = json.loads(fixtures.read_text())["resources"]
    for kind in KINDS:
        made = fake.books.events if kind == "event" else fake.books.all(kind)
        assert made, f"no {kind} was made"
        for each in made:
            shown = {name for name in each if name != "failure_reason"}
            assert shown == set(wanted[kind]), kind
            for name, value in each.items():
                model = wanted[kind].get(name)
                if value is not None and model is not None:
                    assert type(value) is type(model), f"{kind}.{name}"


def test_stripe_s_own_library_reads_every_list(fake: FakeStripe, provider: StripePayments) -> None:
    _lived(fake, provider)
    client = make_client(fake.api_key, fake.url)
    assert [each.status for each in client.v1.invoices.list().auto_paging_iter()] == ["paid"]
    assert client.v1.balance.retrieve().object == "balance"
    lines = client.v1.invoices.line_items.list("in_0000000000000001", {"limit": 1})
    assert [each.amount for each in lines.auto_paging_iter()] == [500, 500]


def test_an_invoice_of_which_nothing_is_left_is_lowered_by_nothing(
    fake: FakeStripe, provider: StripePayments
) -> None:
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    sent = provider.send_invoice(customer, _bill(), Attempt("invoice"))
    assert provider.lower_invoice(sent.external_id, 0, "x", Attempt("none")).remaining_minor == 1000
    assert fake.books.all("credit_note") == []
    lowered = provider.lower_invoice(sent.external_id, 1300, "x", Attempt("all"))
    assert lowered.remaining_minor == 0
    assert [each["amount"] for each in fake.books.all("credit_note")] == [1000]


def test_a_wrong_key_is_told_and_tried_later(fake: FakeStripe) -> None:
    stranger = StripePayments("sk_test_other", api_base=fake.url)
    with pytest.raises(TryLater, match="rejects the API key"):
        stranger.open_customer(Customer("acme", "Acme"), Attempt("customer"))


@pytest.mark.parametrize("base", ["nonsense", "ftp://host", "http://", "https://host?x=1"])
def test_a_broken_api_base_is_refused_by_name(base: str) -> None:
    with pytest.raises(SettingError, match="TOLLHOUSE_STRIPE_API_BASE"):
        make_client("sk_test_x", base)


def test_a_host_that_does_not_answer_is_tried_later() -> None:
    nobody = StripePayments("sk_test_x", api_base="http://127.0.0.1:9")
    with pytest.raises(TryLater):
        nobody.invoice("in_1")


def _until_done(fake: FakeStripe, provider: StripePayments, customer: str) -> Any:
    """Send and collect as the outbox does: again with the same progress until it is through."""
    send, collect = Attempt("invoice:1"), Attempt("collect:1")
    for _ in range(12):
        try:
            sent = provider.send_invoice(customer, _bill(), send)
            return provider.collect_invoice(sent.external_id, collect)
        except TryLater:
            send.again = collect.again = True
    raise AssertionError(f"not through: {fake.calls}")


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("step", sorted(STEPS))
def test_whatever_breaks_at_any_step_an_invoice_is_sent_and_paid_once(
    fake: FakeStripe, provider: StripePayments, step: str, fault: Fault
) -> None:
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    leave_card(fake.books, customer)
    fake.faults.plan(STEPS[step], fault, fault)
    done = _until_done(fake, provider, customer)
    assert (done.status, [each.amount_minor for each in done.payments]) == ("paid", [1000])
    (invoice,) = fake.books.all("invoice")
    assert len(invoice["lines"]["data"]) == 2
    assert len(fake.books.all("charge", status="succeeded")) == 1
    assert fake.faults.seen


@pytest.mark.parametrize("seed", range(12))
def test_under_random_faults_nothing_is_done_twice(
    fake: FakeStripe, provider: StripePayments, seed: int
) -> None:
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    leave_card(fake.books, customer)
    fake.faults.rng.seed(seed)
    fake.faults.rate = 0.15
    attempts = {name: Attempt(name) for name in ("invoice", "collect", "refund")}
    for _ in range(80):
        try:
            sent = provider.send_invoice(customer, _bill(), attempts["invoice"])
            paid = provider.collect_invoice(sent.external_id, attempts["collect"])
            provider.refund(paid.payments[0].external_id, 300, "ref", attempts["refund"])
            break
        except TryLater:
            for attempt in attempts.values():
                attempt.again = True
    counts = [len(fake.books.all(kind)) for kind in ("invoice", "payment_intent", "refund")]
    assert counts == [1, 1, 1]
    assert sum(each["amount"] for each in fake.books.all("charge", status="succeeded")) == 1000


def test_after_the_keys_are_forgotten_what_was_done_is_found(
    fake: FakeStripe, provider: StripePayments
) -> None:
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    fake.faults.plan("POST /v1/invoices$", Fault.TIMEOUT_AFTER)
    attempt = Attempt("invoice:1")
    with pytest.raises(TryLater):
        provider.send_invoice(customer, _bill(), attempt)
    fake.forget_keys()
    attempt.again = True
    assert provider.send_invoice(customer, _bill(), attempt).status == "open"
    assert len(fake.books.all("invoice")) == 1


def test_a_key_that_was_used_for_something_else_is_refused(
    fake: FakeStripe, provider: StripePayments
) -> None:
    provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    with pytest.raises(Refused, match="a different request"):
        provider.open_customer(Customer("acme", "Another"), Attempt("customer"))


def test_lines_that_do_not_add_up_are_never_made_final(
    fake: FakeStripe, provider: StripePayments
) -> None:
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    wrong = Bill("inv_1", "TH-000001", "acme", "USD", 999, _bill().lines)
    with pytest.raises(Refused, match="total of invoice TH-000001 is 1000"):
        provider.send_invoice(customer, wrong, Attempt("invoice:1"))
    assert fake.books.all("invoice")[0]["status"] == "draft"


def test_a_checkout_page_takes_a_card_and_leads_back(
    fake: FakeStripe, provider: StripePayments
) -> None:
    customer = provider.open_customer(Customer("acme", "Acme"), Attempt("customer"))
    link = provider.setup_link(customer, "https://acme.invalid/back")
    assert "Save a card" in httpx.get(link).text
    saved = httpx.post(link, data={"card": "4242"})
    assert (saved.status_code, saved.headers["location"]) == (303, "https://acme.invalid/back")
    assert provider.methods(customer)[0].label == "Visa 4242"
    assert httpx.get(f"{fake.url}/checkout/cs_test_none").status_code == 404


def test_events_can_be_doubled_and_shuffled(fake: FakeStripe, provider: StripePayments) -> None:
    _lived(fake, provider)
    told = shuffled(fake.books.events, seed=3, copies=2)
    assert len(told) == 2 * len(fake.books.events) and told != fake.books.events * 2
    assert {each["id"] for each in told} == {each["id"] for each in fake.books.events}


def test_forms_are_read_as_stripe_writes_them() -> None:
    text = "a=1&lines[0][amount]=5&lines[0][period][start]=7&lines[1][amount]=6&expand[0]=payments"
    assert decode(text) == {
        "a": "1",
        "lines": [{"amount": "5", "period": {"start": "7"}}, {"amount": "6"}],
        "expand": ["payments"],
    }
    assert decode("expand[]=x") == {"expand": ["x"]}
