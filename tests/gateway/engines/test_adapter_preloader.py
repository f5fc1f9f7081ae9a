"""Adapters are where they will be asked for, and gone where they were removed."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.pricing.prices import ensure_default_prices
from billing.usage.usage import record
from core.clock import FakeClock
from core.errors import BadRequest
from core.events import SettledBy, UsageEvent, UsageKind
from core.ids import REQUEST, new_id
from core.tenants.bootstrap import ensure_demo_tenant
from gateway.catalog.catalog import Catalog, NamedAdapter, ServedModel
from gateway.engines.fake import FakeEngine
from gateway.engines.routing.adapter_loads import AdapterPopularity
from gateway.engines.routing.adapter_preloader import AdapterPreloader
from gateway.engines.routing.router import Router
from tests.migrated import migrated

NOW = datetime(2026, 5, 1, tzinfo=UTC)
ADAPTERS = {name: NamedAdapter(name, "m", name * 4, f"/x/{name * 4}", NOW) for name in "abc"}


class Bench:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock(NOW)
        self.database = migrated(f"sqlite:///{tmp_path / 'k.db'}")
        self.router = Router(self.clock)
        self.engines = [FakeEngine(engine_id=name) for name in ("left", "right")]
        self.router.serve_by({"m": self.engines})
        self.catalog = Catalog([ServedModel("m", None, 512, 0)])
        self.catalog.set_adapters({"t1": ADAPTERS})
        self.keeper = AdapterPreloader(self.router, self.catalog, self.database, self.clock)

    def held(self) -> list[set[str]]:
        return [set(engine.adapters()) for engine in self.engines]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_what_is_asked_for_is_loaded_everywhere_and_what_left_is_unloaded(
    bench: Bench,
) -> None:
    for _ in range(3):
        bench.router.popularity.note("aaaa")
    bench.router.popularity.note("bbbb")
    assert await bench.keeper.round() == 2
    assert bench.held() == [{"aaaa"}, {"aaaa"}], "once is not traffic"
    assert await bench.keeper.round() == 0
    bench.catalog.set_adapters({"t1": {"b": ADAPTERS["b"]}})
    await bench.keeper.round()
    assert bench.held() == [set(), set()]


async def test_one_that_cannot_be_loaded_is_left_for_a_minute(bench: Bench) -> None:
    tried = []

    async def _refuse(path: str, digest: str) -> None:
        tried.append(digest)
        raise BadRequest("broken files")

    bench.engines[0].load_adapter = _refuse  # type: ignore[method-assign,assignment]
    bench.router.popularity.note("aaaa", 5)
    assert await bench.keeper.round() == 1, "the other replica has it"
    await bench.keeper.round()
    assert tried == ["aaaa"]
    bench.clock.advance(61)
    await bench.keeper.round()
    assert tried == ["aaaa", "aaaa"]


def test_a_start_knows_the_traffic_before_it(bench: Bench) -> None:
    with bench.database.transaction() as session:
        tenant = ensure_demo_tenant(session, bench.clock).tenant_id
        price = ensure_default_prices(session, bench.clock, "m").id
        millis = int(NOW.timestamp() * 1000)
        event = UsageEvent(
            new_id(REQUEST, millis - 60_000),
            *(tenant, "prj", "key", UsageKind.GENERATION, "/v1/completions", "m", "a", "aaaa"),
            *(price, NOW, NOW, 1, 0, 1, 0, "stop", 200, SettledBy.GATEWAY),
        )
        old = replace(event, request_id=new_id(REQUEST, millis - 7_200_000), adapter_digest="cccc")
        plain = replace(event, request_id=new_id(REQUEST, millis), adapter_digest=None)
        assert record(session, [event, old, plain], bench.clock) == 3
    assert bench.keeper._recent() == [("aaaa", 1)]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 400)), max_size=60))
def test_heat_is_a_decaying_count(asked: list[tuple[str, float]]) -> None:
    clock = FakeClock()
    popularity, true = AdapterPopularity(clock), dict.fromkeys("abcdef", 0.0)
    for name, pause in asked:
        clock.advance(pause)
        true = {each: value * 0.5 ** (pause / 300) for each, value in true.items()}
        popularity.note(name)
        true[name] += 1
    wanted = sorted((n for n in true if true[n] >= 2.0 + 1e-9), key=lambda n: -true[n])[:3]
    found = popularity.most_used(set("abcdef"), 3)
    assert [round(true[n], 6) for n in found][: len(wanted)] == [round(true[n], 6) for n in wanted]
