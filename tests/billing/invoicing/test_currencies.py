"""Prices in several currencies: each keeps its own versions, tiers and usage."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from billing.audit import reconcile
from billing.ledger import ledger
from billing.ledger.ledger import AccountKind
from billing.pricing import prices
from billing.rating import price_changes
from billing.usage import usage
from billing.usage.tables import Charge
from core.clock import FakeClock
from core.errors import BadRequest, NotFound
from core.tenants.models import Tenant
from tests.billing.conftest import START, Deployment


def test_a_price_in_another_currency_ends_no_price(lite: Deployment, clock: FakeClock) -> None:
    clock.advance(60)
    euro = lite.price({"input": "2"}, currency="EUR")
    with lite.database.read() as session:
        book = prices.load_price_book(session)
    now = clock.now() + timedelta(days=400)
    assert book.pin("acme", "demo", None, now, "USD").id == lite.version.id
    assert book.pin("acme", "demo", None, now, "EUR").id == euro.id
    with pytest.raises(NotFound, match=r"'demo' in JPY") as refused:
        book.pin("acme", "demo", None, now, "JPY")
    assert "--currency JPY" in refused.value.next_step


def test_prices_in_two_currencies_share_no_tiers(deployment: Deployment) -> None:
    """Ten free tokens a period in each: a tenant's come from the price in its own currency."""
    deployment.tenant("rhine", currency="EUR")
    free = {"input": "0", "output": {"scheme": "flat", "price": "1000", "free": 10}}
    dollars = deployment.price(free, model="two")
    euros = deployment.price(free, model="two", currency="EUR")
    for tenant, version in (("acme", dollars), ("rhine", euros), ("acme", dollars)):
        deployment.record(
            deployment.event(
                tenant_id=tenant, model="two", price_version=version.id, output_tokens=8
            )
        )
    assert deployment.rate() == 3
    thousandth = 10**9  # picounits of 1000 a million, per token
    with deployment.database.read() as session:
        revenue = {
            (name, currency): ledger.balance(session, name, AccountKind.REVENUE, currency)
            for name, currency in (("acme", "USD"), ("rhine", "EUR"), ("rhine", "USD"))
        }
        assert revenue == {
            ("acme", "USD"): -6 * thousandth,  # 16 used, 10 free
            ("rhine", "EUR"): 0,
            ("rhine", "USD"): 0,
        }
        report = reconcile.audit(session)
        assert report.clean, report.differences


def test_usage_priced_in_another_currency_is_released_when_the_price_comes(
    deployment: Deployment,
) -> None:
    deployment.tenant("rhine", currency="EUR")
    event = deployment.event(tenant_id="rhine")
    deployment.record(event)
    deployment.clock.advance(3600)
    with deployment.database.transaction() as session:
        assert [row.request_id for row in usage.parked(session)] == [event.request_id]
        assert usage.release(session, deployment.clock) == 0  # no price in euros yet
        written = {"input": "1", "cached_input": "1", "output": "1"}
        draft = prices.PriceDraft("demo", written, deployment.clock.now(), currency="EUR")
        version = price_changes.save(session, deployment.clock, draft)
        assert usage.parked(session) == []
    assert deployment.rate() == 1
    with deployment.database.read() as session:
        charge = session.scalars(select(Charge)).one()
        assert (charge.currency, charge.price_version) == ("EUR", version.id)
        assert charge.amount == (100 + 50) * 10**6
        report = reconcile.audit(session)
        assert report.clean, report.differences


def test_usage_takes_the_price_in_force_when_it_occurred(lite: Deployment) -> None:
    lite.tenant("rhine", currency="EUR")
    event = lite.event(tenant_id="rhine")
    lite.record(event)
    day = timedelta(days=1)
    then = lite.price({"input": "1"}, currency="EUR", effective_from=START - day)
    lite.clock.advance(3600)
    lite.price({"input": "9"}, currency="EUR")
    with lite.database.transaction() as session:
        assert usage.release(session, lite.clock) == 1
    lite.rate()
    with lite.database.read() as session:
        assert session.scalars(select(Charge.price_version)).one() == then.id


def test_a_negotiated_price_is_in_the_tenants_currency(lite: Deployment) -> None:
    lite.tenant("rhine", currency="EUR")
    with pytest.raises(BadRequest, match="in USD, but the tenant is billed in EUR"):
        lite.price({"input": "1"}, tenant_id="rhine")
    less = prices.PriceDraft("demo", {}, START, tenant_id="rhine", discount_percent="15")
    with (
        pytest.raises(BadRequest, match="in USD, but the tenant is billed in EUR"),
        lite.database.transaction() as session,
    ):
        prices.discount(session, lite.clock, less, lite.version)
    with lite.database.transaction() as session:
        session.add(
            Tenant(id="elbe", name="elbe", display_name="e", created_at=START, currency="EUR")
        )
    with pytest.raises(BadRequest, match="billed in EUR"):  # which has no account yet
        lite.price({"input": "1"}, tenant_id="elbe")
    lite.price({"input": "1"}, tenant_id="rhine", currency="EUR")
