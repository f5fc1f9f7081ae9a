"""What an engine costs by pool and day, and which batches a worker claims first."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.pricing import engine_prices
from billing.pricing.engine_prices import EnginePriceDraft, EnginePrices
from billing.pricing.tables import EnginePrice
from billing.usage.batch_claims import claim_batches
from billing.usage.tables import UsageBatch
from core.clock import FakeClock
from core.errors import BadRequest
from tests.billing.conftest import START

DAY, DOLLAR = timedelta(days=1), 10**12


def save(session: Session, pool: str, per_hour: str = "1", **fields: Any) -> EnginePrice:
    return engine_prices.save(session, FakeClock(), EnginePriceDraft(pool, per_hour, **fields))


def test_a_price_is_of_its_day_in_utc_and_replaces_the_one_of_that_day(session: Session) -> None:
    at = datetime.fromisoformat("2026-03-01T23:59:59.999999-05:00")
    made = save(session, " h100-* ", "2.50", starts_at=at, note="lease", created_by="ann")
    assert engine_prices.describe(made) == {
        "pool": "h100-*",
        "per_hour": {"amount": "2.5", "units": str(25 * 10**11), "currency": "USD"},
        "from": "2026-03-02",
        "note": "lease",
        "created_by": "ann",
    }
    assert made.starts_at == datetime(2026, 3, 2, tzinfo=UTC)
    again = save(session, "h100-*", "3", currency="EUR", starts_at=at + timedelta(microseconds=1))
    assert again is made and (made.per_hour, made.currency) == (3 * DOLLAR, "EUR")
    today = save(session, "h100-*")
    assert (today.starts_at, today.created_at, today.created_by) == (START, START, "")
    save(session, "a100")
    found = [(each.pool, each.starts_at.month) for each in engine_prices.listed(session)]
    assert found == [("a100", 1), ("h100-*", 3), ("h100-*", 1)]


@pytest.mark.parametrize(
    ("pool", "per_hour", "param"),
    [
        ("p" * 80, "0", ""),
        ("p", "1000000", ""),
        ("p" * 81, "1", "pool"),
        (" ", "1", "pool"),
        ("a b", "1", "pool"),
        ("a\tb", "1", "pool"),
        ("p", "1000000.000000000001", "per_hour"),
        ("p", "-0.000000000001", "per_hour"),
        ("p", "dear", "per_hour"),
    ],
)
def test_a_price_of_a_pool_has_its_borders(
    session: Session, pool: str, per_hour: str, param: str
) -> None:
    if not param:
        assert save(session, pool, per_hour).per_hour == int(per_hour) * DOLLAR
        return
    with pytest.raises(BadRequest) as refused:
        save(session, pool, per_hour)
    assert refused.value.param == param
    with pytest.raises(BadRequest, match="The currency 'XYZ' is unknown"):
        save(session, "p", currency="XYZ")


def test_an_engine_has_the_newest_price_of_the_most_particular_pool() -> None:
    def row(pool: str, day: int, dollars: int) -> EnginePrice:
        at = START + day * DAY
        return EnginePrice(pool=pool, starts_at=at, per_hour=dollars, currency="USD")

    prices = EnginePrices(
        (
            row("*", 0, 1),
            row("gpu-*", 5, 3),
            row("gpu-*", 2, 2),
            row("gpu-?1", 0, 9),
            row("*-west", 0, 4),
            row("gpu-1", 7, 5),
        )
    )

    def at(engine: str, day: int) -> int | None:
        price = prices.at(engine, START + day * DAY)
        return price and price.per_hour

    assert [at("gpu-1", day) for day in (-1, 0, 2, 4, 5, 7)] == [None, 1, 2, 2, 3, 5]
    assert at("gpu-2-west", 9) == 4, "six characters, and first by name"
    assert [at("gpu-x1", 0), at("x-west", 0), at("other", 0), at("a\nb", 0)] == [1, 4, 1, 1]


def waiting(session: Session, *batches: tuple[int, int]) -> None:
    """Shard and events of each."""
    for shard, events in batches:
        session.add(UsageBatch(recorded_at=START, shard=shard, events=events))
        session.flush()


@pytest.mark.parametrize(
    ("most", "claimed"),
    [
        (1, [1]),  # at least one batch
        (14, [1]),
        (15, [1, 3]),
        (19, [1, 3]),
        (20, [1, 3, 6]),
        (27, [1, 3, 4, 6]),
        (999, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_oldest_batch_is_claimed_with_others_of_its_shard_first(
    session: Session, most: int, claimed: list[int]
) -> None:
    waiting(session, (2, 10), (3, 8), (2, 5), (1, 7), (3, 1), (2, 5))
    assert claim_batches(session, UsageBatch.rated_at.is_(None), most_events=most) == claimed


def test_only_batches_that_wait_are_claimed_of_a_thousand_at_once(session: Session) -> None:
    waiting(session, *[(1, 1)] * 1002)
    first = session.scalars(select(UsageBatch).order_by(UsageBatch.id)).first()
    assert first is not None
    first.rated_at = START
    session.flush()
    found = claim_batches(session, UsageBatch.rated_at.is_(None), most_events=5000)
    assert found == list(range(2, 1002))
    none = UsageBatch.shard == 9
    assert claim_batches(session, none, most_events=5000) == []
