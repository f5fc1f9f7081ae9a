"""What a provider's headers say of its key holds for every gateway that uses the key."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from core.clock import FakeClock
from core.counters import Counters
from core.counters_memory import MemoryCounters
from core.counters_redis import RedisCounters
from core.errors import TollhouseError
from gateway.catalog.upstreams import Upstream
from gateway.engines.learned_limits import LearnedLimits, reported, seconds_of
from gateway.engines.ports.client import ProviderEngine
from gateway.engines.upstream_limits import UpstreamLimits
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix
from tests.gateway.engines.ports.answers import MADE
from tests.gateway.engines.test_upstreams import job
from tests.gateway.provider_server import Provider, provider, whole

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
UPSTREAM = Upstream("https://one", provider="openai", api_key="k")


def _headers(limit: int, remaining: int, reset: str, unit: str = "requests") -> dict[bytes, bytes]:
    given = {"limit": str(limit), "remaining": str(remaining), "reset": reset}
    return {f"x-ratelimit-{k}-{unit}".encode(): v.encode() for k, v in given.items()}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture(params=["memory", "redis"])
async def counters(request: pytest.FixtureRequest, clock: FakeClock) -> AsyncIterator[Counters]:
    if request.param == "memory":
        yield MemoryCounters(clock)
        return
    need_redis()
    prefix = new_prefix()
    made = RedisCounters(REDIS, prefix=prefix, clock=clock, timeout_s=10)
    yield made
    await made.close()
    forget(prefix)


def _limits(counters: Counters, clock: FakeClock, upstream: Upstream = UPSTREAM) -> LearnedLimits:
    return LearnedLimits(upstream, "m", counters, clock)


async def _waits(limits: LearnedLimits) -> float:
    """Seconds until the key may be used; 0 if a request was counted."""
    try:
        await limits.take()
    except TollhouseError as error:
        assert error.code == "upstream_busy"
        return error.retry_after_s or 0
    return 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("6m0s", 360),
        ("2m59.56s", 179.56),
        ("120ms", 0.12),
        ("1h2m", 3720),
        ("7.5", 7.5),
        ("2026-11-28T12:00:30Z", 30),
        ("2026-11-28T11:59:30Z", 0),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("\u0663s", None),
    ],
)
def test_resets_are_read_in_the_forms_that_providers_write(
    text: str, seconds: float | None
) -> None:
    assert seconds_of(text, NOW) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        _headers(0, 0, "1s"),
        {b"x-ratelimit-limit-requests": b"10"},
        {b"x-ratelimit-limit-requests": b"ten", b"x-ratelimit-remaining-requests": b"1"},
        {b"x-ratelimit-limit-requests": b"-5", b"x-ratelimit-remaining-requests": b"-1"},
        {b"x-ratelimit-limit-requests": b"9" * 400, b"x-ratelimit-remaining-requests": b"1"},
    ],
)
async def test_headers_that_cannot_be_read_limit_nothing(
    headers: dict[bytes, bytes], counters: Counters, clock: FakeClock
) -> None:
    assert reported(headers, "requests", NOW) is None
    limits = _limits(counters, clock)
    limits.learn(200, headers, "")
    await limits.close()
    assert await _waits(limits) == 0


async def test_a_burst_over_two_gateways_ends_where_the_keys_limit_does(
    counters: Counters, clock: FakeClock
) -> None:
    one, other = _limits(counters, clock), _limits(counters, clock)
    for each in (one, other):
        each.learn(200, _headers(60, 5, "55s"), "")
        await each.close()
    waits = [await _waits(each) for each in (one, other) * 4]
    assert waits[:5] == [0] * 5 and all(each > 0 for each in waits[5:])
    clock.advance(1)  # a sixtieth of a minute: one request is back
    assert [await _waits(one), await _waits(other) > 0] == [0, True]


async def test_another_key_or_model_is_not_held_back(counters: Counters, clock: FakeClock) -> None:
    one = _limits(counters, clock)
    one.learn(429, {}, "20")
    await one.close()
    assert await _waits(one) == pytest.approx(20)
    other = Upstream("https://one", provider="openai", api_key="k2")
    assert await _waits(_limits(counters, clock, other)) == 0
    assert await _waits(LearnedLimits(UPSTREAM, "n", counters, clock)) == 0


@pytest.mark.parametrize(("status", "after", "wait"), [(429, "7", 7), (529, "30", 30)])
async def test_a_busy_provider_is_left_alone_by_all_gateways_for_its_time(
    status: int, after: str, wait: float, counters: Counters, clock: FakeClock
) -> None:
    one, other = _limits(counters, clock), _limits(counters, clock)
    one.learn(status, {}, after)
    await one.close()
    assert await _waits(other) == pytest.approx(wait)
    clock.advance(wait)
    assert await _waits(other) == 0


async def test_a_key_without_tokens_rests_until_a_twentieth_is_back(
    counters: Counters, clock: FakeClock
) -> None:
    limits = _limits(counters, clock)
    limits.learn(200, _headers(10_000, 0, "60s", "tokens"), "")
    await limits.close()
    assert await _waits(limits) == pytest.approx(3)
    clock.advance(3)
    assert await _waits(limits) == 0


async def test_requests_that_are_counted_by_the_day_come_back_over_the_day(
    counters: Counters, clock: FakeClock
) -> None:
    limits = _limits(counters, clock)
    limits.learn(200, _headers(1_440, 0, "24h0m0s"), "")
    await limits.close()
    assert await _waits(limits) == pytest.approx(60)  # 1,440 a day


@pytest.fixture
def server() -> Iterator[Provider]:
    with provider() as made:
        yield made


async def test_the_client_of_a_provider_learns_from_its_answers(server: Provider) -> None:
    made = MADE["anthropic"]
    said = made.stream(False, 0)
    reset = (datetime.now(UTC) + timedelta(seconds=58)).isoformat()
    said.headers |= {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "2",
        "anthropic-ratelimit-requests-reset": reset,
    }
    server.said = said
    upstream = Upstream(server.url, provider="anthropic", api_key="k", upstream_model=made.model)
    counters = MemoryCounters(FakeClock(NOW))
    limits = UpstreamLimits(upstream, counters, FakeClock(NOW))
    engines = [ProviderEngine(upstream, made.model, limits) for _ in range(2)]
    for each in engines:
        await each.start()
    await (await engines[0].generate(job("r1", stream=True))).ended(10)
    await engines[0]._learned.close()
    await (await engines[0].generate(job("r2", stream=True))).ended(10)
    server.said = whole(
        {"type": "error", "error": {"type": "overloaded_error"}}, 529, retry_after="9"
    )
    refused = await engines[1].generate(job("r3"))
    with pytest.raises(TollhouseError):
        await refused.take()
    await engines[1]._learned.close()
    with pytest.raises(TollhouseError) as caught:
        await engines[0].generate(job("r4"))
    assert caught.value.code == "upstream_busy" and len(server.asked) == 3
    for each in engines:
        await each.close()
