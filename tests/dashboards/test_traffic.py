"""Requests of all tenants in a period, against figures computed by hand."""

import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy.orm import Session

from billing.audit import reconcile
from billing.pricing.prices import ensure_default_prices
from billing.usage import usage
from core.clock import Clock, FakeClock
from core.database import Database
from core.events import SettledBy, UsageEvent, UsageKind
from dashboards import traffic
from tests.dashboards.usage_events import usage_event
from tests.gateway.deployment import Deployment

NOW = datetime(2026, 11, 5, 12, tzinfo=UTC)
PAGE = "/dashboard/operator/traffic"


def _event(
    at: datetime, price: str, *, status: int = 200, first_ms: int | None = 120
) -> UsageEvent:
    served = status == 200
    return usage_event(
        at,
        price,
        input_tokens=100 if served else 0,
        cached_tokens=25 if served else 0,
        output_tokens=10 if served else 0,
        waived_tokens=2 if served else 0,
        finish_reason="stop" if served else "error",
        status=status,
        first_token_ms=first_ms if served else None,
        duration_ms=500,
        queue_ms=8,
        engine_id="left",
    )


def _record(session: Session, clock: Clock) -> None:
    """Within the last hour: 16 served, 2 failed and 2 refused; beside them what does not count."""
    now, price = clock.now(), ensure_default_prices(session, clock, "tiny").id
    recent, old = now - timedelta(minutes=5), now - timedelta(hours=2)
    served = [_event(recent, price, first_ms=120) for _ in range(12)]
    served += [
        replace(
            _event(recent, price, first_ms=9_000),
            adapter="sql",
            tenant_id="org_b",
            engine_id="right",
        )
        for _ in range(4)
    ]
    wrong = [_event(recent, price, status=status) for status in (503, 503, 400, 404)]
    other = [
        _event(old, price, status=500),
        replace(_event(recent, price), settled_by=SettledBy.REPORTED),
        replace(_event(recent, price), kind=UsageKind.GPU_SECONDS, quantity=900),
    ]
    usage.record(session, [*served, *wrong, *other], clock)


def test_the_sums_of_a_period_are_those_of_its_requests(database: Database) -> None:
    with database.transaction() as session:
        _record(session, FakeClock(NOW))
    with database.read() as session:
        rows = traffic.read(session, NOW - timedelta(hours=1), NOW)
    everything = traffic.total(rows)
    assert (everything.requests, everything.refused, everything.failed) == (20, 2, 2)
    assert everything.failed_share == 2 / 18
    assert everything.tokens == {
        "input_tokens": 1600,
        "cached_tokens": 400,
        "output_tokens": 160,
        "waived_tokens": 32,
        "queue_ms": 160,
    }
    assert everything.cached_share == 0.25
    assert 100 <= (everything.first_token_ms(0.5) or 0) <= 150  # the class of 120 ms
    assert 5_000 <= (everything.first_token_ms(0.95) or 0) <= 10_000
    engines = traffic.grouped_by(rows, lambda row: row.engine_id)
    assert {name: one.requests for name, one in engines.items()} == {"left": 16, "right": 4}
    assert list(engines) == ["left", "right"]  # the busiest first


def test_no_requests_are_no_errors(database: Database) -> None:
    with database.read() as session:
        everything = traffic.total(traffic.read(session, NOW - timedelta(hours=1), NOW))
    assert everything.requests == 0 and everything.failed_share == 0.0
    assert everything.cached_share is None and everything.first_token_ms(0.95) is None


@pytest.fixture(scope="module")
def deployment(deployment: Deployment) -> Deployment:
    with deployment.services.database.transaction() as session:
        _record(session, deployment.services.clock)
    return deployment


def test_the_page_shows_burn_and_causes(operator: httpx.Client) -> None:
    page = operator.get(PAGE).text
    assert "88.89 %" in page  # 16 of the 18 that were not refused
    assert "111.1×" in page  # 2/18 failed, 0.1 % allowed
    for cause in ("503", "404", "400"):
        assert f">{cause}<" in page
    assert "tiny:sql" in page
    wide = operator.get(f"{PAGE}?period=24h&objective=90").text
    assert "84.21 %" in wide and "1.6×" in wide  # 3 of 19 failed, 10 % allowed
    sheet = operator.get(f"{PAGE}?format=csv").text.splitlines()
    assert sheet[1].startswith("tiny,20,2,")


def test_health_answers_whether_it_is_well_and_where_it_hurts(
    operator: httpx.Client, deployment: Deployment
) -> None:
    reconcile.audit_and_store(deployment.services.database, deployment.services.clock)
    page = operator.get("/dashboard/operator/health").text
    tiles, tables = page.split("</dl>")[0], page.partition("Errors by cause, last hour")[2]
    assert "111.1×" in tiles, "2 of 18 failed in the last hour, 0.1 % allowed"
    assert "/operator/traffic?period=1h" in tiles and "KV in use" in tiles
    for cause in ("503", "404", "400"):
        assert f">{cause}<" in tables
    held = page.partition("Alerts that hold now")[2].partition("Errors by cause")[0]
    count = re.search(r"<dt>Alerts</dt><dd[^>]*><a[^>]*>(\d+)</a>", tiles)
    assert count is not None and int(count[1]) == held.count("<tr>") - 1 > 0
    assert "/operator/alerts#" in held, "each leads to its runbook"
    assert "Latest audits" in page and "Configuration in force" in page


@pytest.mark.parametrize("wrong", ["period=1y", "objective=100", "objective=0", "objective=NaN"])
def test_a_wrong_period_or_objective_is_refused(operator: httpx.Client, wrong: str) -> None:
    assert operator.get(f"{PAGE}?{wrong}").status_code == 400


def test_it_is_not_for_tenants(owner: httpx.Client) -> None:
    assert owner.get(PAGE).status_code == 403
