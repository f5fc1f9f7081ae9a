"""Headers of limits: as OpenAI's, Anthropic's and the IETF draft's clients read them."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import compiled
from core.clock import FakeClock
from core.counters import BucketGrant, BucketState
from core.counters_memory import MemoryCounters
from core.errors import RateLimited
from core.tenants.plans import DAY, FREE, LimitRule, Plan, Scope, Unit
from gateway.admission import headers
from gateway.admission.headers import (
    bucket_headers,
    go_duration,
    retry_headers,
    tollhouse_headers,
)
from gateway.admission.limiter import Limiter
from gateway.admission.request import AdmissionRequest, LimitState
from gateway.admission.reservation import Reservation, plan_buckets
from gateway.request.exchange import Headers
from tests.compiled import built_extension

BUCKETS = (
    BucketState("tenant:requests:60:org_a", 100, 60_000, 40, 36_000, 0),
    BucketState("key:requests:86400:key_a", 1_000, 86_400_000, 10, 85_536_000, 0),
    BucketState("tenant:total_tokens:60:org_a", 20_000, 60_000, 15_000, 15_000, 0),
    BucketState("tenant:input_tokens:60:org_a", 9_000, 60_000, 8_999, 7, 0),
)
NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def _read(headers: Headers) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def test_openais_headers_tell_the_tightest_limit() -> None:
    found = _read(bucket_headers("openai", LimitState.of(BUCKETS), NOW))
    assert {name: value for name, value in found.items() if name.startswith("x-")} == {
        "x-ratelimit-limit-requests": "1000",
        "x-ratelimit-remaining-requests": "10",
        "x-ratelimit-reset-requests": "23h45m36s",
        "x-ratelimit-limit-tokens": "20000",
        "x-ratelimit-remaining-tokens": "15000",
        "x-ratelimit-reset-tokens": "15s",
    }


def test_anthropics_headers_part_input_from_all_tokens() -> None:
    found = _read(bucket_headers("anthropic", LimitState.of(BUCKETS), NOW))
    assert found["anthropic-ratelimit-tokens-limit"] == "20000"
    assert found["anthropic-ratelimit-input-tokens-remaining"] == "8999"
    assert found["anthropic-ratelimit-tokens-reset"] == "2026-03-01T12:00:15Z"
    assert not [name for name in found if "output" in name]


def test_the_drafts_headers_name_every_policy_with_its_unit() -> None:
    found = _read(bucket_headers("openai", LimitState.of(BUCKETS), NOW))
    policies = found["ratelimit-policy"].split(", ")
    assert policies[0] == '"tenant-requests-60";q=100;w=60'
    assert policies[2] == '"tenant-total_tokens-60";q=20000;w=60;qu="tollhouse-tokens"'
    assert found["ratelimit"].split(", ")[3] == '"tenant-input_tokens-60";r=8999;t=1'
    assert bucket_headers("openai", LimitState(), NOW) == []


async def test_the_limits_of_a_grant_are_told_and_not_those_that_were_planned() -> None:
    """A repeated id has its earlier grant; without Redis, a process has its own share of the limits."""
    counters = MemoryCounters(FakeClock())

    async def _told(plan: Plan, id: str, shares: int) -> str:
        request = AdmissionRequest(id, "org_a", "proj_a", "key_a", "demo", plan, prompt_tokens=30)
        planned = plan_buckets(request, 5)
        asked = plan_buckets(request, 5, shares=shares).bucket_request
        grant = await counters.reserve(asked)
        assert isinstance(grant, BucketGrant)
        settler = Limiter(counters, FakeClock())
        limits = Reservation(request, planned, grant, counters, settler, 0, 0).limits()
        found = bucket_headers("openai", limits, NOW)
        assert found == bucket_headers("openai", LimitState.of(grant.buckets), NOW)
        return _read(found)["x-ratelimit-limit-requests"]

    wide, narrow = [
        Plan(f"of {limit}", (LimitRule(Scope.TENANT, Unit.REQUESTS, limit),), 1, 1)
        for limit in (100, 50)
    ]
    assert await _told(wide, "a", 1) == "100"
    assert await _told(narrow, "a", 1) == "100"
    assert await _told(narrow, "b", 1) == "50"
    assert await _told(narrow, "c", 2) == "25"
    assert await _told(wide, "d", 1) == "100"


def test_what_no_convention_covers_is_told_too() -> None:
    found = _read(
        tollhouse_headers(FREE, mode="local", queued_ms=7, shadow=("key:requests:60:key_a",))
    )
    assert found == {
        "x-tollhouse-cached-token-weight": "1",
        "x-tollhouse-limits": "local",
        "x-tollhouse-queued-ms": "7",
        "x-tollhouse-shadow-limits": "key:requests:60",
    }


@pytest.mark.parametrize(
    ("millis", "shown"),
    [
        (0, "0s"),
        (12, "12ms"),
        (1_000, "1s"),
        (1_500, "1.5s"),
        (360_000, "6m0s"),
        (7_200_000, "2h0m0s"),
    ],
)
def test_durations_as_go_writes_them(millis: int, shown: str) -> None:
    assert go_duration(millis) == shown


@given(st.integers(0, 10**9))
def test_a_duration_reads_back(millis: int) -> None:
    shown = go_duration(millis)
    if shown.endswith("ms"):
        assert int(shown[:-2]) == millis
        return
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?([\d.]+)s", shown)
    assert parts is not None
    hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    assert abs((hours * 3600 + minutes * 60 + seconds) * 1000 - millis) < 1


@given(st.floats(0, 10**5))
def test_retry_after_is_never_too_early(seconds: float) -> None:
    found = retry_headers(seconds)
    assert int(found["retry-after-ms"]) >= seconds * 1000 - 1e-6
    assert int(found["retry-after"]) * 1000 >= int(found["retry-after-ms"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Unit.REQUESTS, Unit.TOTAL_TOKENS, Unit.INPUT_TOKENS]),
            st.integers(200, 5_000),
            st.sampled_from([60, 3_600, DAY]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 150), min_size=1, max_size=40),
)
async def test_a_client_that_obeys_retry_after_gets_through(
    limits: list[tuple[Unit, int, int]], prompts: list[int]
) -> None:
    """Whatever the limits are: after exactly the wait that the 429 says, the request is admitted."""
    clock = FakeClock()
    limiter = Limiter(MemoryCounters(clock), clock)
    rules = tuple(LimitRule(Scope.TENANT, unit, limit, period) for unit, limit, period in limits)
    plan = Plan("p", rules, 1, 1, expected_output=20)
    admitted = 0
    for number, prompt in enumerate(prompts * 20):
        request = AdmissionRequest(
            f"req_{number}", "org", "proj", "key", "m", plan, prompt, max_output_tokens=20
        )
        try:
            await limiter.reserve(request)
        except RateLimited as refused:
            headers = retry_headers(refused.retry_after_s)
            clock.advance(int(headers["retry-after-ms"]) / 1000)
            await limiter.reserve(request)
        admitted += 1
    assert admitted == len(prompts) * 20


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = Path(compiled.__file__).with_name("kernel.c")
    return built_extension(source, tmp_path_factory.mktemp("headers"))


_number = st.one_of(st.integers(-3, 70_000), st.integers(0, 2**52), st.integers(0, DAY * 2_000))
_unit = st.sampled_from(["requests", "total_tokens", "input_tokens", "output_tokens", "other"])
_state = st.builds(
    lambda unit, capacity, left, reset: BucketState(
        f"a%b:{unit}:60:org:a", capacity, 60_000, left, reset, 0
    ),
    _unit,
    st.integers(1, 2**52 - 1),
    _number,
    _number,
)


@given(st.lists(_state, min_size=1, max_size=6))
def test_the_compiled_headers_are_the_plain_ones(kernel: Any, states: list[BucketState]) -> None:
    limits = LimitState.of(tuple(states))
    found = []
    for fields in (None, kernel.Fields):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "Fields", fields)
            headers._template.cache_clear()
            found.append(bucket_headers("openai", limits, NOW))
    headers._template.cache_clear()
    assert found[0] == found[1]
    assert len(found[0]) % 3 == 2
