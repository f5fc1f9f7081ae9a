"""Money that a request holds beyond its estimate: whole tokens, what is beside them, cached answers."""

import asyncio
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from billing.pricing.pricing import Component, Counts, PriceBook, PriceVersion, Rate, Scheme, Tier
from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.database import Database
from core.errors import DependencyDown, InsufficientQuota, Unavailable
from core.tenants.plans import LimitRule, Plan, Scope, Unit
from gateway.admission import limiter as limiter_module
from gateway.admission.limiter import Admission, Limiter
from gateway.admission.prices import CostBounds, PriceList
from gateway.admission.request import AdmissionRequest, MoneyLimit
from gateway.admission.reservation import output_tokens_covered, plan_buckets

TOKEN = 2_000_000  # picounits
PLAN = Plan("test", (LimitRule(Scope.KEY, Unit.TOTAL_TOKENS, 1_000),), 1, 1, cached_permille=0)
REQUEST = AdmissionRequest("req_1", "org_a", "proj_a", "key_a", "demo", PLAN, prompt_tokens=50)


def paid(money_for: float, **fields: object) -> AdmissionRequest:
    """With money for so many output tokens, beside the prompt's 50."""
    cap = MoneyLimit("budget", 50 * TOKEN + round(money_for * TOKEN), 0)
    base = {"money": (cap,), "base_cost_units": 50 * TOKEN, "output_cost_units": TOKEN}
    return replace(REQUEST, **(base | {"max_output_tokens": 10} | fields))


def limiter() -> Limiter:
    return Limiter(MemoryCounters(FakeClock()), FakeClock())


@pytest.mark.parametrize(
    ("money_for", "granted", "held"), [(10.9, 0, 10), (11, 1, 11), (11.9, 1, 11.9), (30, 5, 15)]
)
async def test_an_extension_holds_money_for_one_token_at_least_or_none(
    money_for: float, granted: int, held: float
) -> None:
    limits = limiter()
    reservation = await limits.reserve(paid(money_for))
    assert reservation.covered == 10
    assert await limits.extend(reservation, 5) == granted
    assert reservation.held_units == (50 + held) * TOKEN
    assert reservation.covered == 10 + granted


async def test_an_extension_charges_the_whole_prompt_beside_the_output() -> None:
    limits = limiter()
    reservation = await limits.reserve(paid(100))
    assert reservation.buckets[0].remaining == 1_000 - 50 - 10
    assert await limits.extend(reservation, 30) == 30
    after = await limits.reserve(replace(REQUEST, request_id="req_2", max_output_tokens=1))
    assert after.buckets[0].remaining == 1_000 - (50 + 40) - (50 + 1)


async def test_what_the_counters_never_answered_is_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limiter_module, "_EXTEND_PAUSE_S", 0.0)
    counters = MemoryCounters(FakeClock())
    limits = Limiter(counters, FakeClock())
    reservation = await limits.reserve(paid(100))

    async def _away(*_given: object) -> int:
        raise Unavailable("away")

    monkeypatch.setattr(counters, "extend", _away)
    with pytest.raises(DependencyDown, match="money cannot be checked"):
        await limits.extend(reservation, 5)
    assert reservation.held_units == 60 * TOKEN


async def test_a_dead_gateways_request_is_settled_to_its_cost() -> None:
    """By another process, which has no reservation for it."""
    limits = limiter()
    reservation = await limits.reserve(paid(30, max_output_tokens=30))
    limits.keep(reservation)
    with pytest.raises(InsufficientQuota):
        await limits.reserve(paid(30, request_id="req_2", max_output_tokens=1))
    await limits.settle_lost("org_a", "req_1", 20 * TOKEN)
    with pytest.raises(InsufficientQuota, match="output tokens to 10"):
        await limits.reserve(paid(30, request_id="req_3", max_output_tokens=99))
    after = await limits.reserve(paid(30, request_id="req_3", max_output_tokens=10))
    assert after.covered == 80 - 20 - 50


def test_a_token_of_the_smallest_price_is_not_covered_by_nothing() -> None:
    request = paid(1, output_cost_units=1)
    found = [output_tokens_covered(request, 50 * TOKEN + more) for more in (-5, 0, 1, 2)]
    assert found == [0, 0, 1, 2]


def test_a_prompt_is_taken_whole_where_cached_tokens_count_for_nothing() -> None:
    (take,) = plan_buckets(REQUEST, 20).bucket_request.takes
    assert (take.amount, take.keep) == (70, 50)


@pytest.mark.parametrize(("shares", "limit"), [(1, 1_000), (2, 500), (3, 333)])
def test_two_processes_share_a_limit_as_more_of_them_do(shares: int, limit: int) -> None:
    (take,) = plan_buckets(REQUEST, 20, shares=shares).bucket_request.takes
    assert take.capacity == limit


def price(name: str, model: str = "*", **rates: int) -> PriceVersion:
    """Picounits per unit of each component."""
    flat = {Component(k): Rate(Scheme.FLAT, (Tier(None, unit),)) for k, unit in rates.items()}
    return PriceVersion(name, "USD", MappingProxyType(flat), model=model)


def test_the_bound_of_a_request_with_an_adapter_has_the_adapters_fee() -> None:
    of = CostBounds().of
    terms = price("price_1", input=10, output=30, adapter=7_000)
    assert of(terms, REQUEST) == (500, 30)
    assert of(terms, replace(REQUEST, adapter="legal")) == (7_500, 30)


def admission_of(prices: PriceList, *versions: PriceVersion, cap: int) -> Admission:
    clock = FakeClock()
    prices._book = PriceBook(versions)
    prices._limited = frozenset({"org_a"})
    prices._money[("org_a", "proj_a", "key_a", None)] = (MoneyLimit("budget", cap, 0),)
    return Admission(Limiter(MemoryCounters(clock), clock), prices, clock)


async def test_what_is_beside_tokens_is_held_with_the_prompt(sqlite_database: Database) -> None:
    prices = PriceList(sqlite_database, FakeClock())
    admission = admission_of(
        prices, price("p", input=1_000, output=30_000, request=9_000), cap=10**9
    )
    plain = await admission.reserve(replace(REQUEST, max_output_tokens=1))
    bound = Counts.of_answer(0, 0, 0)
    more = await admission.reserve(
        replace(REQUEST, request_id="req_2", max_output_tokens=1, bound=bound)
    )
    assert prices._book.versions[0].most_for(bound) == 9_000
    assert more.held_units - plain.held_units == 9_000


@pytest.mark.parametrize(
    ("fee", "adapter_fee", "adapter", "fits"),
    [
        (5_000, 0, None, True),
        (80_000, 0, None, True),  # all that is held
        (80_001, 0, None, False),
        (5_000, 80_000, None, True),
        (5_000, 80_000, "legal", False),
    ],
)
async def test_a_cached_answer_is_repriced_where_the_held_money_covers_it(
    sqlite_database: Database, fee: int, adapter_fee: int, adapter: str | None, fits: bool
) -> None:
    admission = admission_of(
        PriceList(sqlite_database, FakeClock()),
        price("own", input=1_000, output=30_000),
        price("cached", "*@cache", request=fee, adapter=adapter_fee),
        cap=10**9,
    )
    held = await admission.reserve(replace(REQUEST, max_output_tokens=1, adapter=adapter))
    assert held.held_units == 50 * 1_000 + 30_000
    assert admission.reprice_cached(held) is fits
    assert held.price_version == ("cached" if fits else "own")


async def test_without_a_money_limit_a_cached_answer_always_has_its_price(
    sqlite_database: Database,
) -> None:
    admission = admission_of(
        PriceList(sqlite_database, FakeClock()),
        price("own", input=1_000),
        price("cached", "*@cache", request=10**9),
        cap=0,
    )
    free = await admission.reserve(replace(REQUEST, tenant_id="org_b"))
    assert admission.reprice_cached(free) and free.price_version == "cached"


async def test_an_extension_ends_with_its_request() -> None:
    """A client that leaves while money is asked for gives everything back."""
    limits = limiter()
    reservation = await limits.reserve(paid(30, max_output_tokens=10))
    task = asyncio.create_task(limits.extend(reservation, 20))
    await limits.release(reservation)
    await task
    again = await limits.reserve(paid(30, request_id="req_2", max_output_tokens=30))
    assert again.covered == 30
