"""Stripe Tax and Stripe's events: what is asked, and what each answer and each type of event means."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from stripe import WebhookSignature

from billing.archive import server
from billing.archive.server import ServerClient
from billing.payments.base import ProviderEvent, Refused
from billing.payments.stripe import webhooks
from billing.payments.stripe.taxes import StripeTaxes
from billing.taxes.taxes import Buyer, Supply, Tax, TaxRequest, Treatment
from core.clock import FakeClock
from core.errors import Conflict, DependencyDown
from tests.billing.payments.stripe_wire import Wire, refusal

START = datetime(2026, 1, 1, tzinfo=UTC)
AT = int(START.timestamp())
DAY = timedelta(days=1)


def _service(wire: Wire, now: datetime = START) -> StripeTaxes:
    made = StripeTaxes(FakeClock(now), "sk_test_x")
    made._client = wire.client()
    return made


def _part(reason: str = "standard_rated", **fields: Any) -> dict[str, Any]:
    details = {"tax_type": "vat", "percentage_decimal": "19.0"} | fields.pop("details", {})
    plain = {"taxable_amount": 100, "amount": 19, "taxability_reason": reason}
    return plain | {"tax_rate_details": details} | fields


def _answer(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"object": "tax.calculation", "tax_breakdown": list(parts)}


def test_each_supply_is_asked_for_at_its_time() -> None:
    wire = Wire({"POST tax/calculations": _answer(_part())})
    buyer = Buyer("US-NY", "10001", "12-3456789")
    supplies = (Supply(START, 100), Supply(START, 0), Supply(START - 31 * DAY, -50))
    found = _service(wire).taxes(TaxRequest("USD", "DE", buyer, supplies))
    assert found == [Tax("VAT", 190_000, 0, 0)], "the second is taken back"
    form = {
        "currency": "usd",
        "line_items[0][amount]": "100",
        "line_items[0][reference]": "net",
        "line_items[0][tax_behavior]": "exclusive",
        "line_items[0][tax_code]": "txcd_10103001",
        "customer_details[address][country]": "US",
        "customer_details[address][state]": "NY",
        "customer_details[address][postal_code]": "10001",
        "customer_details[address_source]": "billing",
        "customer_details[taxability_override]": "none",
        "customer_details[tax_ids][0][type]": "us_ein",
        "customer_details[tax_ids][0][value]": "12-3456789",
        "tax_date": str(AT),
    }
    old = {"line_items[0][amount]": "50", "tax_date": str(AT - 30 * 86_400)}
    assert wire.forms("POST") == [form, form | old]


def test_a_buyer_without_a_place_or_with_an_exemption() -> None:
    wire = Wire({"POST tax/calculations": _answer(_part("customer_exempt"))})
    asked = TaxRequest("EUR", "DE", Buyer("", tax_id="x"), (Supply(START, 1),))
    assert _service(wire).taxes(asked) == [] and wire.calls == []
    exempt = TaxRequest("EUR", "DE", Buyer("AQ", tax_id="x", exempt=True), (Supply(START, 1),))
    assert _service(wire).taxes(exempt) == [Tax("VAT", 0, 1, 0, Treatment.EXEMPT)]
    form = wire.calls[0].form
    assert form["customer_details[taxability_override]"] == "customer_exempt"
    assert not any("tax_ids" in name or "state" in name or "postal" in name for name in form)


@pytest.mark.parametrize(
    ("part", "net", "tax"),
    [
        (_part(), 100, Tax("VAT", 190_000, 100, 19)),
        (_part(), -100, Tax("VAT", 190_000, -100, -19)),
        (_part(details={"percentage_decimal": "8.875"}), 100, Tax("VAT", 88_750, 100, 19)),
        (_part(details={"tax_type": "sales_tax"}), 100, Tax("Sales tax", 190_000, 100, 19)),
        (_part(details={"tax_type": None}), 100, Tax("Tax", 190_000, 100, 19)),
        (_part(details={"tax_type": "gst"}), 100, Tax("GST", 190_000, 100, 19)),
        (_part("not_collecting"), 100, None),
        (_part("not_subject_to_tax"), 100, None),
        (_part("not_supported"), 100, None),
    ],
)
def test_what_a_part_of_the_answer_means(part: dict[str, Any], net: int, tax: Tax | None) -> None:
    wire = Wire({"POST tax/calculations": _answer(part)})
    asked = TaxRequest("EUR", "DE", Buyer("DE"), (Supply(START, net),))
    assert _service(wire).taxes(asked) == ([] if tax is None else [tax])


def test_reverse_charge_and_an_address_that_is_refused() -> None:
    wire = Wire({"POST tax/calculations": _answer(_part("reverse_charge"))})
    buyer = Buyer("FR", tax_id="FR40303265045")
    found = _service(wire).taxes(TaxRequest("EUR", "DE", buyer, (Supply(START, 100),)))
    proof = "FR40303265045"
    assert found == [Tax("VAT", 0, 100, 0, Treatment.REVERSE_CHARGE, proof)]
    assert wire.calls[0].form["customer_details[tax_ids][0][type]"] == "eu_vat"
    bad = Wire({"POST tax/calculations": refusal(400, "no such place")})
    with pytest.raises(Conflict, match="Stripe Tax refuses the address in FR: no such place"):
        _service(bad).taxes(TaxRequest("EUR", "DE", buyer, (Supply(START, 100),)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("invoice.paid", "invoice"),
        ("invoice.created", "nothing"),
        ("invoice.created.later", "invoice"),
        ("invoice_payment.paid", "invoice"),
        ("invoiceitem.created", "nothing"),
        ("charge.succeeded", "nothing"),
        ("charge.refund.updated", "refund"),
        ("charge.dispute.closed", "dispute"),
        ("checkout.session.completed", "method"),
        ("checkout.session.expired", "nothing"),
        ("payment_method.detached", "customer"),
        ("payment_method.attached", "method"),
        ("customer.updated", "customer"),
        ("customer.deleted", "nothing"),
        ("customer", "unknown"),
        ("galaxy.exploded", "unknown"),
    ],
)
def test_the_kind_of_an_event_is_by_its_longest_name(name: str, kind: str) -> None:
    assert webhooks.kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "about", "subject"),
    [
        ("invoice.paid", {"object": "invoice", "id": "in_1"}, "in_1"),
        (
            "invoice_payment.paid",
            {"object": "invoice_payment", "id": "x", "invoice": "in_2"},
            "in_2",
        ),
        ("invoice_payment.paid", {"object": "invoice_payment", "invoice": {"id": "in_3"}}, "in_3"),
        ("customer.updated", {"object": "customer", "id": "cus_1"}, "cus_1"),
        ("payment_method.attached", {"object": "payment_method", "customer": "cus_2"}, "cus_2"),
        ("payment_method.detached", {"object": "payment_method", "customer": None}, ""),
        ("refund.updated", {"object": "refund", "id": "re_1"}, "re_1"),
        ("payment_intent.succeeded", {"object": "payment_intent", "id": None}, ""),
    ],
)
def test_what_an_event_is_about(name: str, about: dict[str, Any], subject: str) -> None:
    told = {"id": "evt_1", "type": name, "created": AT, "data": {"object": about}}
    kind = webhooks.kind_of(name)
    assert webhooks.read(told) == ProviderEvent("evt_1", name, kind, subject, START, told)


@pytest.mark.parametrize(
    "change",
    [{"data": 7}, {"data": {}}, {"data": {"object": []}}, {"type": ""}, {"id": ""}],
)
def test_what_is_no_event_is_refused(change: dict[str, Any]) -> None:
    told = {"id": "evt_1", "type": "invoice.paid", "data": {"object": {"id": "in_1"}}}
    assert webhooks.read(told).occurred_at == datetime(1970, 1, 1, tzinfo=UTC)
    with pytest.raises(Refused, match="The body is not a Stripe event"):
        webhooks.read(told | change)


def test_an_event_is_signed_with_the_secret() -> None:
    told = {"object": "event", "id": "evt_1", "type": "invoice.paid", "created": AT}
    text = json.dumps(told | {"data": {"object": {"object": "invoice", "id": "in_1"}}})
    header = WebhookSignature.generate_signature_header(text, "whsec_a")
    assert webhooks.event(text.encode(), header, "whsec_a").subject_id == "in_1"
    for secret, said in (("whsec_b", "The signature is wrong"), ("", "WEBHOOK_SECRET is not set")):
        with pytest.raises(Refused, match=said):
            webhooks.event(text.encode(), header, secret)
    with pytest.raises(Refused, match="The signature is wrong"):
        webhooks.event(text.encode(), None, "whsec_a")


class Driver:
    """Stands for the driver of ClickHouse, which is over a network."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.done: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None

    def get_client(self, **options: Any) -> "Driver":
        self.opened.append(options)
        if self.failure is not None:
            raise self.failure
        return self

    def _do(self, *done: Any) -> None:
        self.done.append(done)
        if self.failure is not None:
            raise self.failure

    def command(self, statement: str) -> None:
        self._do("command", statement)

    def insert(self, table: str, rows: Any, column_names: list[str]) -> None:
        self._do("insert", table, rows, column_names)

    def query_row_block_stream(self, query: str, parameters: dict[str, Any]) -> "Driver":
        self._do("rows", query, parameters)
        return self

    def __enter__(self) -> Iterator[list[list[int]]]:
        return iter([[[1, 2]], [[3, 4]]])

    def __exit__(self, *_: object) -> None:
        self.done.append(("ended",))

    def close(self) -> None:
        self._do("closed")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(server.clickhouse_connect, "get_client", made.get_client)
    return made


def test_a_server_is_connected_once_and_anew_after_a_failure(driver: Driver) -> None:
    client = ServerClient("clickhouse://user:secret@host.example:8123/db")
    client.command("a")
    client.insert("t", ("x", "y"), [(1, 2)])
    assert list(client.rows("q", {"day": "d"})) == [(1, 2), (3, 4)]
    options = {"dsn": "clickhouse://user:secret@host.example:8123/db", "connect_timeout": 10}
    options |= {"autogenerate_session_id": False}
    # A command may be silent while rows are rewritten: the server is asked on another connection.
    assert driver.opened == [options | {"send_receive_timeout": each} for each in (3600, 20)]
    assert driver.done == [
        ("command", "a"),
        ("insert", "t", [(1, 2)], ["x", "y"]),
        ("rows", "q", {"day": "d"}),
        ("ended",),
    ]
    calls: tuple[Any, ...] = (
        lambda: client.command("a"),
        lambda: client.insert("t", ("x",), [(1,)]),
        lambda: list(client.rows("q", {})),
        client.ping,
    )
    for call in calls:
        driver.failure = OSError("e" * 400 + "\nmore")
        with pytest.raises(DependencyDown) as told:
            call()
        said = f"ClickHouse on host.example does not answer: {'e' * 300}."
        assert str(told.value).startswith(said) and told.value.retry_after_s == 5.0
        driver.failure = None
        before = len(driver.opened)
        client.command("again")
        assert len(driver.opened) == before + 1


def test_a_ping_has_a_connection_and_time_outs_of_its_own(driver: Driver) -> None:
    client = ServerClient("clickhouse://host/db", timeout_s=3)
    client.command("a")
    client.ping()
    assert [each["connect_timeout"] for each in driver.opened] == [3, 2]
    assert [each["send_receive_timeout"] for each in driver.opened] == [3600, 2]
    assert driver.done[-1] == ("closed",)
    client.command("b")
    assert len(driver.opened) == 2, "its own is kept"
