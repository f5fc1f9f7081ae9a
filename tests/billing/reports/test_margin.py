"""Engine time and its price against what usage earned, by figures worked out by hand.

List price of the model: 0.15 per million input tokens, half of it for cached ones, 0.60 per million
output tokens. An hour of an engine costs 3.60, so a second costs 0.001.
"""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from billing.audit import reconcile
from billing.pricing import engine_prices
from billing.pricing.engine_prices import EnginePriceDraft, EnginePrices
from billing.reports import margin
from billing.usage import service_rollups, usage
from core.errors import BadRequest
from core.events import CountedBy, EngineCount, UsageEvent
from core.money import units_of
from tests.billing.conftest import Deployment

DAY = datetime(2026, 1, 1, tzinfo=UTC)
LATER = datetime(2026, 1, 20, tzinfo=UTC)
SECOND = 1_000_000


def served(made: Deployment, **changes: Any) -> UsageEvent:
    return made.event(**{"engine_id": "h100-1", "counted_by": CountedBy.ENGINE, **changes})


def store(made: Deployment, *events: UsageEvent) -> None:
    """Events, and their receipts by a way of their own; rated and summed."""
    made.record(*events)
    with made.database.transaction() as session:
        usage.store_receipts(
            session,
            [
                EngineCount(
                    each.request_id,
                    each.engine_id,
                    each.input_tokens,
                    each.cached_tokens,
                    each.output_tokens + each.waived_tokens,
                    each.finished_at,
                    each.busy_us,
                )
                for each in events
            ],
        )
    made.rate()
    service_rollups.sum_all(made.database, made.clock)


def price(made: Deployment, pool: str, per_hour: str, **fields: Any) -> None:
    with made.database.transaction() as session:
        draft = EnginePriceDraft(pool, per_hour, **{"starts_at": DAY, **fields})
        engine_prices.save(session, made.clock, draft)


def report(made: Deployment, *by: str, currency: str = "USD") -> margin.MarginReport:
    with made.database.read() as session:
        return margin.read(session, DAY, LATER, by or ("model",), currency)


def test_a_long_context_costs_more_than_its_tokens_show(deployment: Deployment) -> None:
    """Two tenants with the same tokens, cached alike: one reads a long context again and again."""
    deployment.tenant("short")
    price(deployment, "*", "3.60")
    tokens = {"input_tokens": 100_000, "cached_tokens": 90_000, "output_tokens": 1_000}
    long = served(deployment, busy_us=9 * SECOND, **tokens)
    many = [
        served(
            deployment,
            tenant_id="short",
            busy_us=SECOND // 10,
            input_tokens=1_000,
            cached_tokens=900,
            output_tokens=10,
        )
        for _ in range(100)
    ]
    # The hundred short requests have as many tokens, and take 10 s together for a hundred answers.
    store(deployment, long, *many)
    earned = 10_000 * 150_000 + 90_000 * 75_000 + 1_000 * 600_000
    rows = {row.group["tenant"]: row for row in report(deployment, "tenant").rows}
    assert rows["acme"].tokens == rows["short"].tokens == 101_000
    assert rows["acme"].revenue == rows["short"].revenue == earned == 8_850_000_000
    assert (rows["acme"].busy_us, rows["short"].busy_us) == (9 * SECOND, 10 * SECOND)
    assert rows["acme"].cost == units_of("0.009") and rows["short"].cost == units_of("0.010")
    # One answer of a long context costs 90 times what a short one costs, and loses money.
    assert rows["acme"].margin == 8_850_000_000 - 9_000_000_000 == -150_000_000


def test_each_day_and_engine_has_its_own_price(deployment: Deployment) -> None:
    price(deployment, "*", "1.00")
    price(deployment, "h100-*", "7.20")
    price(deployment, "h100-*", "3.60", starts_at=datetime(2026, 1, 3, 18, tzinfo=UTC))
    first = served(deployment, busy_us=2 * SECOND)  # 0.004
    cpu = served(deployment, busy_us=3600 * SECOND, engine_id="cpu")  # 1.00
    store(deployment, first, cpu)
    deployment.clock.advance(days=2)  # the price of the 3rd begins with its day
    store(deployment, served(deployment, busy_us=5 * SECOND, adapter="law"))  # 0.005
    whole = report(deployment).rows
    assert [row.cost for row in whole] == [units_of("1.009")]
    by_adapter = {row.group["adapter"]: row.cost for row in report(deployment, "adapter").rows}
    assert by_adapter == {"": units_of("1.004"), "law": units_of("0.005")}
    assert report(deployment).total.busy_us == 3607 * SECOND


def test_sums_are_rounded_once(deployment: Deployment) -> None:
    price(deployment, "*", "0.000000000001")  # a picounit an hour
    for _ in range(3):
        store(deployment, served(deployment, busy_us=1200 * SECOND))
    assert report(deployment).rows[0].cost == 1


def test_time_without_a_price_is_told_and_costs_nothing(deployment: Deployment) -> None:
    price(deployment, "h100-*", "3.60")
    store(deployment, served(deployment, busy_us=SECOND, engine_id="spare"))
    found = report(deployment)
    assert found.unpriced_us == {"spare": SECOND}
    assert (found.rows[0].unpriced_us, found.rows[0].cost) == (SECOND, 0)
    shown = margin.describe(found)
    assert shown["unpriced_engines"] == [{"engine": "spare", "engine_seconds": "1.000000"}]
    assert shown["data"][0]["engine_seconds"] == "1.000000"


def test_tenants_in_another_currency_are_in_another_report(deployment: Deployment) -> None:
    deployment.tenant("euro", currency="EUR")
    price(deployment, "*", "3.60")
    version = deployment.price({"input": "1", "output": "2"}, currency="EUR")
    dollars = served(deployment, busy_us=SECOND)
    euros = served(deployment, busy_us=2 * SECOND, tenant_id="euro", price_version=version.id)
    store(deployment, dollars, euros)
    assert report(deployment).total.busy_us == SECOND
    assert report(deployment, currency="EUR").total.busy_us == 2 * SECOND


def test_a_rebuild_and_a_replay_change_nothing(deployment: Deployment) -> None:
    price(deployment, "*", "3.60")
    event = served(deployment, busy_us=SECOND)
    store(deployment, event)
    before = margin.describe(report(deployment, "tenant", "model", "adapter"))
    assert deployment.record(event) == 0
    with deployment.database.transaction() as session:
        service_rollups.rebuild(session, deployment.clock)
    assert margin.describe(report(deployment, "tenant", "model", "adapter")) == before


def test_the_audit_finds_busy_time_that_differs_from_the_receipt(deployment: Deployment) -> None:
    event = served(deployment, busy_us=SECOND)
    deployment.record(event)
    with deployment.database.transaction() as session:
        counts = (event.input_tokens, event.cached_tokens, 53)
        usage.store_receipts(
            session,
            [EngineCount(event.request_id, "h100-1", *counts, event.finished_at, SECOND + 1)],
        )
    deployment.rate()
    with deployment.database.read() as session:
        (found,) = reconcile.audit(session).differences
    assert "busy time" in found.message and found.request_ids == (event.request_id,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pool": ""}, "pool"),
        ({"pool": "a b"}, "pool"),
        ({"pool": "x" * 81}, "pool"),
        ({"per_hour": "free"}, "per hour"),
        ({"per_hour": "-1"}, "per hour"),
        ({"per_hour": "NaN"}, "per hour"),
        ({"per_hour": "1000001"}, "per hour"),
        ({"currency": "ABC"}, "currency"),
    ],
)
def test_a_wrong_price_is_refused_with_what_is_wrong(
    lite: Deployment, change: dict[str, str], named: str
) -> None:
    draft = EnginePriceDraft(**{"pool": "*", "per_hour": "1", **change})
    with pytest.raises(BadRequest, match=named), lite.database.transaction() as session:
        engine_prices.save(session, lite.clock, draft)


def test_a_price_of_the_same_day_is_replaced(lite: Deployment) -> None:
    price(lite, "*", "1.00")
    price(lite, "*", "2.00")
    with lite.database.read() as session:
        prices = EnginePrices.load(session)
    assert [row.per_hour for row in prices.rows] == [units_of("2.00")]
    assert prices.at("tcp://10.0.0.1:5555", LATER) is prices.rows[0]
    assert prices.at("any", datetime(2025, 12, 31, tzinfo=UTC)) is None


def test_an_unknown_group_is_refused(lite: Deployment) -> None:
    with pytest.raises(BadRequest, match="region"):
        report(lite, "region")


def test_an_event_cannot_have_negative_time(lite: Deployment) -> None:
    with pytest.raises(ValueError, match="busy_us"):
        replace(lite.event(), busy_us=-1)
