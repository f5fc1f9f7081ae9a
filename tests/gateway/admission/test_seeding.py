"""When spend is rebuilt: after other gateways had time to ship, once for all requests of a key."""

import asyncio

import pytest
from msgspec.structs import replace

from core.counters import Cap
from core.errors import DependencyDown
from core.tenants.plans import Plan
from gateway.admission import seeding as seeding_module
from gateway.admission.prices import Owner
from gateway.admission.request import AdmissionRequest, MoneyLimit
from gateway.admission.seeding import Seeding
from tests.gateway.admission.owners import Owners

REQUEST = AdmissionRequest(
    "req_1", "org_a", "proj_a", "key_a", "demo", Plan("test", (), 1, 1), prompt_tokens=5
)


class Counters:
    def __init__(self, began: int, now: int) -> None:
        self.age = began, now
        self.seeded: list[tuple[str, tuple[Cap, ...]]] = []

    async def born(self) -> tuple[int, int]:
        return self.age

    async def seed(self, group: str, caps: tuple[Cap, ...]) -> None:
        self.seeded.append((group, caps))


class Prices(Owners):
    def __init__(self) -> None:
        self.asked: list[Owner] = []

    async def read_limits(self, owner: Owner) -> tuple[MoneyLimit, ...]:
        self.asked.append(owner)
        return (MoneyLimit("budget", 9_000, 2_000),)


async def _stored() -> None:
    return


@pytest.mark.parametrize(("age_ms", "pause"), [(1_000, 2.0), (3_000, 0.0), (99_000, 0.0)])
async def test_the_wait_is_what_is_left_since_the_data_began(
    monkeypatch: pytest.MonkeyPatch, age_ms: int, pause: float
) -> None:
    pauses: list[float] = []

    async def _sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(seeding_module.asyncio, "sleep", _sleep)
    counters = Counters(50_000, 50_000 + age_ms)
    seeding = Seeding(counters, Prices(), settle_s=3.0, stored=_stored)  # type: ignore[arg-type]
    await seeding.seed(REQUEST)
    assert pauses == [pause]
    assert counters.seeded == [("org_a", (Cap("budget", 9, 2),))]


async def test_requests_of_one_key_share_a_rebuild_and_later_ones_begin_another() -> None:
    prices, go = Prices(), asyncio.Event()

    async def _wait() -> None:
        await go.wait()

    seeding = Seeding(Counters(0, 0), prices, settle_s=0.0, stored=_wait)  # type: ignore[arg-type]
    waiting = [
        asyncio.create_task(seeding.seed(replace(REQUEST, key_id=key)))
        for key in ("key_a", "key_a", "key_b")
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()  # its client left; the others go on
    go.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert sorted(owner[2] for owner in prices.asked) == ["key_a", "key_b"]
    await seeding.seed(REQUEST)
    assert len(prices.asked) == 3 and not seeding._running


async def test_usage_that_is_never_stored_refuses_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def _never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(seeding_module, "_LONGEST_S", 0.01)
    counters = Counters(0, 0)
    seeding = Seeding(counters, Prices(), settle_s=0.0, stored=_never)  # type: ignore[arg-type]
    with pytest.raises(DependencyDown, match="not stored yet") as refused:
        await seeding.seed(REQUEST)
    assert refused.value.retry_after_s == 2.0 and counters.seeded == []
