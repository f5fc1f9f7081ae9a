"""Top-ups, sinks of records, the seller and certificates: their rules at the borders."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.invoicing import sellers
from billing.notices import request_sinks
from billing.notices.request_sinks import Sink, SinkOptions, SinkView
from billing.notices.tables import WebhookEndpoint
from billing.payments import settlement, top_ups
from billing.payments.tables import Payment, TopUp
from billing.taxes import tax_exemptions, tax_quotes
from billing.taxes.tables import TaxQuote
from billing.taxes.taxes import Buyer, Certificate, Supply, Tax, TaxRequest
from core.errors import BadRequest, Conflict, NotFound, Unavailable
from core.money import Money, units_of
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import invoice_row

DAY, MOMENT = timedelta(days=1), timedelta(microseconds=1)
ACME = scope_of_operator("acme")


def _rule(session: Session, threshold: int = 10, amount: str = "5", **fields: Any) -> TopUp:
    return top_ups.configure(
        session,
        "acme",
        Money(threshold, fields.get("a", "USD")),
        Money(units_of(amount), fields.get("b", "USD")),
    )


def test_a_rule_of_top_ups_is_whole_and_in_the_account_s_currency(session: Session) -> None:
    rule = _rule(session, 0, "0.01")
    assert (rule.threshold, rule.amount, rule.currency, rule.enabled) == (0, 10**10, "USD", True)
    for fields in ({"a": "EUR"}, {"b": "EUR"}, {"a": "EUR", "b": "EUR"}):
        with pytest.raises(BadRequest, match="The account is in USD") as told:
            _rule(session, **fields)
        assert told.value.code == "currency_mismatch"
    for threshold, amount in ((-1, "5"), (1, "0"), (1, "0.001"), (1, "-5")):
        with pytest.raises(BadRequest, match="above zero and in whole minor units") as told:
            _rule(session, threshold, amount)
        assert told.value.param == "amount"
    rule.enabled = False
    assert top_ups.tenants_with_rules(session) == []
    assert _rule(session) is rule and rule.enabled and rule.threshold == 10
    assert top_ups.tenants_with_rules(session) == ["acme"]


def test_one_payment_at_a_time_is_asked_for_a_low_wallet(session: Session) -> None:
    rule = _rule(session, units_of("5"))
    (first,) = top_ups.due(session, "stripe", START)
    kept = (first.amount_minor, first.currency, first.provider, first.invoice_id, first.status)
    assert kept == (500, "USD", "stripe", None, "pending")
    assert first.reference == rule.pending_reference == "top-up:acme:1"
    assert (rule.last_at, rule.last_error) == (START, None)
    assert top_ups.due(session, "stripe", START + DAY) == [], "the first is not settled"
    settlement.succeed(session, first, START)
    assert top_ups.due(session, "stripe", START + DAY) == [], "the wallet is at the threshold"
    assert rule.pending_reference is None
    rule.threshold += 1
    session.flush()
    assert top_ups.due(session, "stripe", START + DAY, "birch") == []
    (second,) = top_ups.due(session, "stripe", START + DAY, "acme")
    settlement.fail(session, second, "x" * 200, START)
    assert top_ups.due(session, "stripe", START + 2 * DAY) == []
    assert (rule.enabled, rule.pending_reference, rule.last_error) == (False, None, "x" * 120)
    assert top_ups.due(session, "stripe", START + 3 * DAY) == []
    assert len(session.scalars(select(Payment)).all()) == 2


def _set(
    session: Session, lite: Deployment, url: str = "https://r.example", **options: Any
) -> Sink:
    return request_sinks.set_sink(session, ACME, lite.clock, url, SinkOptions(**options))


def test_a_tenant_has_one_sink_of_records(session: Session, lite: Deployment) -> None:
    assert request_sinks.sink_of(session, ACME) is None
    first = _set(session, lite)
    assert first == Sink(first.id, "https://r.example", first.secret, False, START)
    lite.clock.advance(hours=1)
    key = "Bearer x"
    second = _set(session, lite, content=True, format="otlp", sample_percent=5, authorization=key)
    assert request_sinks.sink_of(session, ACME) == second
    assert second == Sink(
        second.id, "https://r.example", second.secret, True, lite.clock.now(), "otlp", 5, key
    )
    rows = session.scalars(select(WebhookEndpoint).order_by(WebhookEndpoint.created_at)).all()
    assert [each.events for each in rows] == [["request.completed"], ["request.content"]]
    assert [bool(each.ended_at) for each in rows] == [True, False]
    request_sinks.remove_sink(session, ACME, lite.clock)
    assert request_sinks.sink_of(session, ACME) is None
    bucket = _set(session, lite, "s3://my-bucket/a/b")
    assert bucket.is_bucket and not second.is_bucket
    session.commit()
    view = SinkView(lite.database)
    view.refresh()
    assert view.sinks == {"acme": bucket}


@pytest.mark.parametrize(
    ("url", "options", "param"),
    [
        ("https://r.example", {"format": "f"}, "format"),
        ("https://r.example", {"sample_percent": 0}, "sample_percent"),
        ("https://r.example", {"sample_percent": 101}, "sample_percent"),
        ("https://r.example", {"authorization": "x" * 401}, "authorization"),
        ("https://r.example", {"authorization": "\u00e9"}, "authorization"),
        ("https://r.example", {"authorization": "a\nb"}, "authorization"),
        ("s3://bucket", {"format": "otlp"}, "url"),
        ("s3://bucket", {"authorization": "x"}, "url"),
        ("s3://B", {}, "url"),
        ("s3://ab", {}, "url"),
        ("s3://bucket//x", {}, "url"),
    ],
)
def test_options_that_a_sink_cannot_have(
    session: Session, lite: Deployment, url: str, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest, match=f"{param} is wrong: ") as told:
        _set(session, lite, url, **options)
    assert told.value.param == param


def test_the_borders_of_a_sink(session: Session, lite: Deployment) -> None:
    assert _set(session, lite, sample_percent=1, authorization="x" * 400).sample_percent == 1
    assert _set(session, lite, sample_percent=100, authorization="").authorization is None
    every = _set(session, lite, "s3://abc/")
    assert all(every.takes(f"req_{n}") for n in range(200))
    ids = [f"req_{n}" for n in range(2000)]
    taken = [
        each for each in ids if Sink("i", "u", "s", False, START, sample_percent=10).takes(each)
    ]
    assert 140 < len(taken) < 260
    few = [each for each in ids if Sink("i", "u", "s", False, START, sample_percent=1).takes(each)]
    assert set(few) < set(taken)


def test_the_seller_s_fields_and_their_lengths(session: Session) -> None:
    for name, most in (
        ("name", 200),
        ("address", 2000),
        ("tax_id", 80),
        ("bank_details", 1000),
        ("footer", 1000),
    ):
        seller = sellers.change(session, {"tax_region": "AQ", name: " " + "x" * most + " "})
        assert getattr(seller, name) == "x" * most
        least = "1" if name == "name" else "0"
        said = f"{name} has {most + 1} characters; it takes {least} to {most}."
        with pytest.raises(BadRequest, match=said) as told:
            sellers.change(session, {name: "x" * (most + 1)})
        assert told.value.param == name
    with pytest.raises(BadRequest, match="name has 0 characters"):
        sellers.change(session, {"name": " "})
    assert sellers.change(session, {"footer": "", "tax_id": "", "tax_region": " "}).tax_region == ""
    for wrong in ("", "x" * 21, "a_b"):
        with pytest.raises(BadRequest, match="it takes 1 to 20 letters") as told:
            sellers.change(session, {"number_prefix": wrong})
        assert told.value.param == "number_prefix"


def test_numbers_begin_before_the_first_invoice(session: Session) -> None:
    for wrong in (0, -1, 10**12, "7", 1.5):
        with pytest.raises(BadRequest, match="it must be a positive whole number") as told:
            sellers.change(session, {"next_number": wrong})
        assert told.value.param == "next_number"
    assert sellers.change(session, {"next_number": 10**12 - 1}).next_number == 10**12 - 1
    seller = sellers.change(session, {"next_number": 1, "number_prefix": "A-1"})
    assert sellers.describe(seller) == {
        "id": DEFAULT_SELLER_ID,
        "name": seller.name,
        "address": "",
        "tax_id": "",
        "bank_details": "",
        "footer": "",
        "tax_region": "",
        "number_prefix": "A-1",
        "next_number": 1,
        "next_label": "A-1-000001",
        "logo": None,
    }
    invoice_row(session, 7, sent=False)
    assert sellers.change(session, {"next_number": 1}).next_number == 1
    with pytest.raises(Conflict, match=r"cannot become 9: .* the last one is 7") as late:
        sellers.change(session, {"next_number": 9})
    assert late.value.param == "next_number"


def test_a_logo_is_a_small_picture(session: Session) -> None:
    png = b"\x89PNG\r\n\x1a\n"
    seller = sellers.change(session, {"logo": png + b"x" * (2**18 - 8)})
    assert sellers.describe(seller)["logo"] == "image/png"
    assert sellers.logo_uri(seller).startswith("data:image/png;base64,iVBORw0KGgp4")
    for wrong in (png + b"x" * (2**18 - 7), b"GIF8"):
        with pytest.raises(BadRequest, match=f"The logo has {len(wrong)} bytes") as told:
            sellers.change(session, {"logo": wrong})
        assert told.value.param == "logo"
    with session.no_autoflush:
        session.refresh(seller)
    assert sellers.logo_uri(sellers.change(session, {"logo": b""})) == ""


def _certificate(session: Session, number: str, start: datetime, **fields: Any) -> Any:
    given = {
        "tenant_id": "acme",
        "region": "DE",
        "valid_to": None,
        "recorded_by": "ann",
        "at": START,
    }
    return tax_exemptions.record(session, number=number, valid_from=start, **given | fields)


def test_certificates_are_recorded_and_ended(session: Session) -> None:
    late = _certificate(session, "late", START + DAY)
    first = _certificate(session, "first", START, valid_to=START + MOMENT)
    _certificate(session, "theirs", START, tenant_id="birch")
    assert (late.recorded_by, late.recorded_at, late.region) == ("ann", START, "DE")
    with pytest.raises(BadRequest, match="valid_to is 2026-01-01") as told:
        _certificate(session, "never", START, valid_to=START)
    assert told.value.param == "valid_to"
    assert [each.number for each in tax_exemptions.of_tenant(session, "acme")] == ["first", "late"]
    assert tax_exemptions.certificates(session, ["acme", "cedar"]) == {
        "acme": (
            Certificate("first", "DE", START, START + MOMENT),
            Certificate("late", "DE", START + DAY, None),
        )
    }
    assert tax_exemptions.end(session, "acme", late.id, START + 3 * DAY).valid_to == START + 3 * DAY
    assert tax_exemptions.end(session, "acme", late.id, START + 5 * DAY).valid_to == START + 3 * DAY
    assert tax_exemptions.end(session, "acme", first.id, START).valid_to == START
    for tenant, name in (("birch", late.id), ("acme", "txe_x")):
        with pytest.raises(NotFound, match=f"There is no tax exemption '{name}'"):
            tax_exemptions.end(session, tenant, name, START)


ASKED = TaxRequest("EUR", "DE", Buyer("FR"), (Supply(START, 100),))


class Taxed:
    def __init__(self) -> None:
        self.asked: list[TaxRequest] = []

    def taxes(self, request: TaxRequest) -> list[Tax]:
        self.asked.append(request)
        return [Tax("VAT", 200_000, 100, 20)]


def test_a_tax_service_is_asked_once_for_each_request(lite: Deployment) -> None:
    service = Taxed()

    def _build(_session: Session, taxes: Any) -> list[Tax]:
        nowhere = replace(ASKED, buyer=Buyer(""))
        nothing = replace(ASKED, supplies=(Supply(START, 0),))
        assert taxes.taxes(nowhere) == taxes.taxes(nothing) == []
        return list(taxes.taxes(ASKED))

    for _ in range(2):
        found = tax_quotes.with_taxes(lite.database, lite.clock, service, _build)
        assert found == [Tax("VAT", 200_000, 100, 20)]
    assert service.asked == [ASKED]
    with lite.database.read() as session:
        assert session.scalars(select(TaxQuote)).one().asked_at == START
    assert tax_quotes.with_taxes(lite.database, lite.clock, None, _build) == []
    moving: Iterator[int] = iter(range(1, 99))

    def _moves(_session: Session, taxes: Any) -> list[Tax]:
        return list(taxes.taxes(replace(ASKED, supplies=(Supply(START, next(moving)),))))

    with pytest.raises(Unavailable, match="changed 5 times") as told:
        tax_quotes.with_taxes(lite.database, lite.clock, service, _moves)
    assert (told.value.code, told.value.retry_after_s) == ("taxes_unavailable", 60.0)
    assert len(service.asked) == 6
    missing = tax_quotes.QuotesMissing([ASKED, ASKED])
    assert str(missing) == "2 tax requests have no answer yet" and missing.requests == [
        ASKED,
        ASKED,
    ]
