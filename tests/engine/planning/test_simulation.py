"""The scheduler in simulated time: steps that are taken at once change nothing, and the counts are the
engine's."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.loop import Engine
from engine.planning.devices import device
from engine.planning.known_models import known_shape
from engine.planning.precision import precision
from engine.planning.simulation import Load, Simulation, measured, planned
from engine.planning.step_times import Layout, Serving
from engine.protocol import Receipt
from engine.runners.fake import FakeRunner


def _config(**changed: object) -> EngineConfig:
    given = {
        "num_blocks": 400, "max_running": 16, "max_batch_tokens": 512, "step_s": 0.0,
        "prefix_cache": False, "speculation": "off", "max_waiting": 100_000,
        "max_waiting_per_tenant": 100_000, "enable_lora": False, **changed,
    }  # fmt: skip
    return EngineConfig(model="fake", **given)  # type: ignore[arg-type]


def _seconds(rows: float, context: float, tokens: float, before: float) -> float:
    return 0.005 + 1e-4 * rows + 1e-7 * rows * context + 2e-5 * tokens + 1e-9 * tokens * before


def _without_shares(receipts: list[Receipt]) -> list[Receipt]:
    """A step's share is added up in another order."""
    return [replace(each, busy_us=0) for each in receipts]


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.5, 60),
    st.tuples(st.integers(1, 200), st.integers(1, 120)),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.integers(1, 4),
    st.integers(60, 400),
    st.integers(0, 1000),
)
def test_leaps_change_nothing(
    rate: float, lengths: tuple[int, int], spread: float, tenants: int, blocks: int, seed: int
) -> None:
    prompt, output = lengths
    load = Load(
        rate=rate, requests=30, prompt=prompt, output=output, spread=spread, tenants=tenants, seed=seed
    )  # fmt: skip
    config = _config(num_blocks=blocks, max_context=blocks * 16)
    slow, quick = (Simulation(config, _seconds, leaps=leaps) for leaps in (False, True))
    plain, leaping = slow.run(load), quick.run(load)
    assert _without_shares(leaping) == _without_shares(plain)
    assert quick.steps == slow.steps
    assert quick.clock.now == slow.clock.now


def test_the_counts_are_those_of_the_engine_with_its_fake_runner() -> None:
    load = Load(rate=20, requests=40, prompt=90, output=30, tenants=3)
    simulated = Simulation(_config(), _seconds).run(load)
    now = [0.0]
    engine = Engine(_config(), FakeRunner(_config()), clock=lambda: now[0])
    found: list[Receipt] = []
    coming = list(load.arrivals())
    while coming or engine.busy:
        while coming and coming[0][0] <= now[0]:
            engine.submit(coming.pop(0)[1], "test")
        if not engine.step() and coming:
            now[0] = coming[0][0]
        now[0] += 0.006
        for outbox in engine.take_outboxes().values():
            found.extend(outbox.receipts)

    def _counts(receipts: list[Receipt]) -> list[tuple[object, ...]]:
        return sorted(
            (int(r.request_id), r.prompt, r.computed, r.generated, r.delivered) for r in receipts
        )

    assert _counts(simulated) == _counts(found)


def test_a_shared_prefix_is_found_in_the_cache() -> None:
    load = Load(rate=5, requests=20, prompt=200, output=10, shared=160)
    receipts = Simulation(_config(prefix_cache=True), _seconds).run(load)
    assert sum(each.cached == 160 for each in receipts) >= 15


def test_the_same_seed_is_the_same_load() -> None:
    load = Load(rate=20, requests=50, prompt=90, output=30)
    first, second = (Simulation(_config(), _seconds).run(load) for _ in range(2))
    assert first == second
    assert Simulation(_config(), _seconds).run(replace(load, seed=2)) != first


def test_beyond_the_knee_goodput_falls() -> None:
    shape = known_shape("llama-3.1-8b")
    assert shape is not None
    seconds = planned(Serving(shape, precision("bf16"), 2.0, device("l4"), Layout()))
    config = _config(num_blocks=2000, max_running=64)

    def _goodput(rate: float) -> float:
        simulation = Simulation(config, seconds)
        receipts = simulation.run(Load(rate=rate, requests=80, prompt=500, output=40))
        return measured(receipts, simulation.clock.now, ttft=3.0, tpot=0.3).goodput

    little, much = _goodput(0.5), _goodput(20.0)
    assert little == pytest.approx(0.5, rel=0.25)
    assert much < 0.3 * 20.0  # of what was offered


def test_figures_of_no_requests_are_zero() -> None:
    assert measured([], 0.0).goodput == 0
