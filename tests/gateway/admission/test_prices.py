"""Prices and money limits in memory: read when first needed, refreshed together, dropped when idle."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from billing.notices.tables import Budget
from billing.pricing.prices import ensure_default_prices
from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.database import Database
from core.errors import DependencyDown, NotFound
from core.tenants.plans import Plan
from gateway.admission import prices as prices_module
from gateway.admission.limiter import Admission, Limiter
from gateway.admission.prices import CostBounds, PriceList
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import NO_LIMIT
from tests.gateway.metering.spool_rows import closed

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
REQUEST = AdmissionRequest(
    "req_1", "org_a", "proj_a", "key_a", "m", Plan("test", (), 1, 1), prompt_tokens=30
)


class Priced:
    def __init__(self, database: Database) -> None:
        self.database, self.clock = database, FakeClock(NOW)
        self.prices = PriceList(database, self.clock)
        with database.transaction() as session:
            self.price = ensure_default_prices(session, FakeClock(NOW - timedelta(days=9)), "m").id
        self.limit("org_a", 5_000)
        self.prices.refresh()

    def limit(self, tenant: str, cap: int, *, hard: bool = True, ended: bool = False) -> None:
        with self.database.transaction() as session:
            session.add(
                Budget(
                    id=f"budget_{tenant}_{cap}", tenant_id=tenant, scope="tenant", scope_id=tenant,
                    currency="USD", cap=cap, window="total", hard=hard,
                    created_at=NOW - timedelta(days=1), ended_at=NOW if ended else None,
                )
            )  # fmt: skip

    async def money(self, tenant: str = "org_a") -> list[int]:
        quote = await self.prices.quote(replace(REQUEST, tenant_id=tenant), self.clock.now())
        assert quote.price.id == self.price
        return sorted(each.cap_units for each in quote.money)


@pytest.fixture
def priced(sqlite_database: Database) -> Priced:
    return Priced(sqlite_database)


async def test_a_refresh_reads_a_budget_once_however_many_keys_and_labels_meet_it(
    priced: Priced,
) -> None:
    """Every tenant's prices wait for a refresh, and a client chooses its labels."""
    statements: list[str] = []

    def _note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    with priced.database.transaction() as session:
        for value in range(4):
            session.add(
                Budget(
                    id=f"budget_{value}", tenant_id="org_a", scope="label", scope_id=f"team={value}",
                    currency="USD", cap=1_000, window="total", hard=True,
                    created_at=NOW - timedelta(days=1),
                )
            )  # fmt: skip
    priced.prices.refresh()
    counts = []
    event.listen(priced.database.db_engine, "before_cursor_execute", _note)
    try:
        for keys in (1, 20):
            for key in range(keys):
                for value in range(4):
                    request = replace(REQUEST, key_id=f"key_{key}", labels=f"team={value}")
                    assert len((await priced.prices.quote(request, NOW)).money) == 2
            statements.clear()
            priced.prices.refresh()
            counts.append(len(statements))
    finally:
        event.remove(priced.database.db_engine, "before_cursor_execute", _note)
    assert counts[0] == counts[1]


async def test_only_hard_limits_that_are_open_hold_money(priced: Priced) -> None:
    priced.limit("org_a", 7_000, hard=False)
    priced.limit("org_a", 8_000, ended=True)
    priced.limit("org_b", 9_000, hard=False)
    priced.prices.refresh()
    assert await priced.money() == [5_000]
    assert await priced.money("org_b") == []


async def test_limits_are_read_for_the_first_request_and_then_refreshed(
    priced: Priced, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await priced.money() == [5_000]
    priced.limit("org_a", 6_000)
    assert await priced.money() == [5_000]

    def _no_read(*_: object) -> None:
        raise AssertionError("a known key waits for no query")

    monkeypatch.setattr(priced.prices, "_read", _no_read)
    priced.prices.refresh()
    assert await priced.money() == [5_000, 6_000]


async def test_the_limits_of_a_key_that_asks_no_more_are_dropped(priced: Priced) -> None:
    await priced.money()
    priced.clock.advance(599.999)
    priced.prices.refresh()
    assert len(priced.prices._money) == len(priced.prices._seen) == 1
    priced.clock.advance(0.001)
    priced.prices.refresh()
    assert (priced.prices._money, priced.prices._seen) == ({}, {})


async def test_money_is_closed_while_the_database_does_not_answer(
    priced: Priced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _away(*_: object) -> None:
        raise OperationalError("select", {}, Exception("away"))

    monkeypatch.setattr(priced.prices, "_read", _away)
    with pytest.raises(DependencyDown, match="budget cannot be checked") as refused:
        await priced.money()
    assert refused.value.retry_after_s == 2.0
    assert await priced.money("org_b") == [], "a tenant without limits is served on"
    with pytest.raises(NotFound):
        await priced.prices.quote(replace(REQUEST, model="unpriced", currency="EUR"), NOW)


def test_the_cost_of_an_event_is_by_its_own_price(priced: Priced) -> None:
    event = replace(closed("req_1"), price_version=priced.price)
    assert priced.prices.cost_of_event(event) > 0
    assert priced.prices.cost_of_event(replace(event, price_version="gone")) == 0


async def test_an_admitted_request_holds_the_most_that_it_can_cost(priced: Priced) -> None:
    limiter = Limiter(MemoryCounters(priced.clock), priced.clock)
    admission = Admission(limiter, priced.prices, priced.clock)
    free = await admission.reserve(replace(REQUEST, tenant_id="org_b"))
    assert (free.held_units, free.covered, free.price_version) == (0, NO_LIMIT, priced.price)
    assert free.price is not None
    base = free.price.upper_bound(30, 0, adapter=False)
    each = free.price.upper_bound(30, 1, adapter=False) - base
    with priced.database.transaction() as session:
        for row in session.query(Budget):
            row.cap = base + 40 * each
    priced.prices.refresh()
    held = await admission.reserve(replace(REQUEST, max_output_tokens=10))
    assert (held.request.base_cost_units, held.request.output_cost_units) == (base, each)
    assert base + 10 * each <= held.held_units < base + 10 * each + 1_000
    assert [limit.cap_units for limit in held.request.money] == [base + 40 * each]


def test_bounds_are_kept_by_price_size_and_adapter_and_are_bounded(
    priced: Priced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices_module, "_MAX_CACHED_BOUNDS", 2)
    (price,) = priced.prices._book.versions[:1]
    bounds = CostBounds()
    first = bounds.of(price, REQUEST)
    assert bounds.of(price, REQUEST) is first
    base = price.upper_bound(30, 0, adapter=False)
    assert first == (base, price.upper_bound(30, 1, adapter=False) - base)
    bounds.of(price, replace(REQUEST, adapter="legal"))
    assert len(bounds._known) == 2
    longer = bounds.of(price, replace(REQUEST, prompt_tokens=60))
    assert len(bounds._known) == 1 and longer[0] > first[0]
