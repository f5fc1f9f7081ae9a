"""Counters equal ledger: after requests that end in every way, what the buckets and the money keep
is the sum over the recorded usage events, computed here from the price and nothing else."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.events import UsageEvent
from tests.gateway.admission.endings import CACHED, FEE, INPUT, OUTPUT, Gateway, Way

STREAM = st.booleans()
PROMPTS = st.sampled_from(
    ["hello", "A longer prompt, whose blocks are cached when it comes again. " * 3]
)
AFTER = st.sampled_from([0, 2])  # tokens before the end

WAYS = st.one_of(
    st.builds(Way, tokens=st.integers(1, 6), stream=STREAM, prompt=PROMPTS),
    st.builds(
        Way,
        engine=st.sampled_from(["gone", "slow", "error", "lost"]),
        tokens=AFTER,
        stream=STREAM,
        prompt=PROMPTS,
    ),
    st.builds(Way, engine=st.sampled_from(["busy", "down"]), stream=STREAM),
    st.builds(
        Way,
        block=st.sampled_from(["prompt", "answer"]),
        paid_by=st.sampled_from(["tenant", "operator"]),
        tokens=st.just(4),
        stream=STREAM,
    ),
    st.builds(Way, bad=st.just(True)),
    st.builds(Way, fallback=st.just(True), stream=STREAM),
    st.builds(Way, fallback=st.just(True), engine=st.just("down"), stream=STREAM),
)


def expected(events: Iterable[UsageEvent], refused: int) -> dict[str, int]:
    """`refused` requests were wrong in themselves: the limits on requests count them, nothing else."""
    found = dict.fromkeys(("requests", "input_tokens", "output_tokens", "total_tokens", "money"), 0)
    for event in events:
        fee = event.quantity if event.status < 500 else 0
        tokens = event.input_tokens + event.output_tokens
        cost = fee * FEE + event.output_tokens * OUTPUT + event.cached_tokens * CACHED
        cost += (event.input_tokens - event.cached_tokens) * INPUT
        timed_out = event.finish_reason == "deadline_exceeded"  # free, but it counts as a request
        found["requests"] += 1 if fee or tokens or event.waived_tokens or timed_out else 0
        # Cached tokens weigh nothing in the limits of this plan.
        found["input_tokens"] += event.input_tokens - event.cached_tokens
        found["output_tokens"] += event.output_tokens
        found["total_tokens"] += tokens - event.cached_tokens
        found["money"] += -(-cost // 1000)
    found["requests"] += refused
    return found


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    made = Gateway(tmp_path_factory.mktemp("endings"))
    yield made
    made.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ways=st.lists(WAYS, min_size=1, max_size=5))
def test_what_the_counters_keep_is_what_the_events_charge(
    gateway: Gateway, loop: asyncio.AbstractEventLoop, ways: list[Way]
) -> None:
    async def _check() -> None:
        for way in ways:
            await gateway.run(way)
        assert await gateway.kept() == expected(gateway.events(), gateway.refused)
        assert await gateway.held() == (0, 0)
        assert not gateway.services.spool.file.open_requests()

    loop.run_until_complete(_check())


# way -> (HTTP status that the client saw, (reason, input charged, output, waived) of each event)
TABLE: dict[Way, tuple[Any, ...]] = {
    Way(): (200, ("length", True, 3, 0)),
    Way(engine="gone", tokens=0): (0, ("client_closed", True, 0, 0)),
    Way(engine="gone", tokens=2, stream=True): (200, ("client_closed", True, 2, 0)),
    Way(engine="slow", tokens=0): (503, ("deadline_exceeded", False, 0, 0)),
    Way(engine="slow", tokens=2): (503, ("deadline_exceeded", False, 0, 2)),
    Way(engine="slow", tokens=2, stream=True): (200, ("deadline_exceeded", True, 2, 0)),
    Way(engine="error", tokens=0): (503, ("engine_failed", False, 0, 0)),
    Way(engine="error", tokens=2, stream=True): (200, ("engine_failed", True, 2, 0)),
    Way(engine="lost", tokens=2, stream=True): (200, ("engine_unavailable", True, 2, 0)),
    Way(engine="busy"): (429, ("upstream_busy", False, 0, 0)),
    Way(engine="down"): (503, ("engine_unavailable", False, 0, 0)),
    Way(block="prompt"): (400, ("content_filter", True, 0, 0)),
    Way(block="prompt", paid_by="operator"): (400, ("content_filter", False, 0, 0)),
    Way(block="answer", tokens=4, stream=True): (200, ("content_filter", True, 1, 3)),
    Way(bad=True): (400,),
    Way(fallback=True): (200, ("length", True, 3, 0)),
    Way(fallback=True, engine="down"): (503, ("engine_unavailable", False, 0, 0)),
}


@pytest.mark.parametrize("way", TABLE, ids=str)
def test_the_endings_are_those_that_they_are_named_for(
    gateway: Gateway, loop: asyncio.AbstractEventLoop, way: Way
) -> None:
    before = len(gateway.events())
    status = loop.run_until_complete(gateway.run(way))
    new = [
        (event.finish_reason, event.input_tokens > 0, event.output_tokens, event.waived_tokens)
        for event in gateway.events()[before:]
    ]
    assert (status, *new) == TABLE[way]
