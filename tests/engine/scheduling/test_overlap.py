"""The overlapped loop against an ideal schedule, in simulated time: every sequence that is ready has a
row in every step, and the device never waits for the host."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.batch import Sampled, StepBatch
from engine.loop import Engine
from engine.runners.fake import FakeRunner
from tests.engine.helpers import Clock, Collected, ask, make_config, run_alone

STEP_S = 0.01  # a step on the device
LAUNCH_S = 0.002  # the host's work for one step


@dataclass
class Device:
    """A runner whose steps take simulated time beside the host, one after the other."""

    inner: FakeRunner
    clock: Clock
    free_at: float = 0.0
    idle_s: float = 0.0
    batches: list[StepBatch] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, batch: StepBatch) -> tuple[list[Sampled], float]:
        self.clock.now += LAUNCH_S
        if self.batches:
            self.idle_s += max(0.0, self.clock.now - self.free_at)
        self.free_at = max(self.clock.now, self.free_at) + STEP_S
        self.batches.append(batch)
        return self.inner.launch(batch), self.free_at

    def collect(self, ticket: tuple[list[Sampled], float]) -> list[Sampled]:
        sampled, ready_at = ticket
        self.clock.now = max(self.clock.now, ready_at)
        return self.inner.collect(sampled)


def overlapped(**changes: object) -> tuple[Engine, Device]:
    config, clock = make_config(num_blocks=512, **changes), Clock()
    device = Device(FakeRunner(config, overlapped=True), clock)
    return Engine(config, device, clock=clock), device


def run(engine: Engine, arrivals: dict[int, Any]) -> Collected:
    """Steps until idle; `arrivals` submits requests before the step of that number."""
    found, step = Collected(), 0
    while engine.busy or any(at >= step for at in arrivals):
        if step in arrivals:
            engine.submit(arrivals[step], "g")
        engine.step()
        found.take(engine)
        step += 1
        assert step < 1000
    return found


def test_one_sequence_has_a_row_in_every_step() -> None:
    engine, device = overlapped()
    found = run(engine, {0: ask("a", [7] * 5, max_tokens=24)})
    assert found.tokens["a", 0] == run_alone(ask("a", [7] * 5, max_tokens=24))[0]
    assert [len(batch.rows) for batch in device.batches] == [1] * 24
    assert device.idle_s == 0.0
    assert engine._clock.now - 1000.0 == pytest.approx(LAUNCH_S + 24 * STEP_S)


def test_staggered_sequences_all_have_a_row_in_every_step() -> None:
    engine, device = overlapped()
    arrivals = {at: ask(f"r{at}", [at + 3] * 6, max_tokens=30) for at in (0, 1, 2, 5, 9)}
    found = run(engine, arrivals)
    # Ideal: a request that arrives before step N has a row in each of the steps N to N + 29.
    ideal = [sum(at <= step < at + 30 for at in arrivals) for step in range(39)]
    assert [len(batch.rows) for batch in device.batches] == ideal
    tokens = [sum(len(row.tokens) for row in batch.rows) for batch in device.batches]
    assert tokens == [n + 5 * (step in arrivals) for step, n in enumerate(ideal)]
    assert device.idle_s == 0.0
    assert sum(r.discarded for r in found.receipts.values()) == 0
    for at, request in arrivals.items():
        assert found.tokens[f"r{at}", 0] == run_alone(request)[0]


def test_an_end_that_the_host_learns_late_costs_one_discarded_row() -> None:
    engine, device = overlapped()
    alone = run_alone(ask("a", [9] * 5, max_tokens=24))[0]
    stop = alone[10]
    expected = alone.index(stop) + 1
    request = ask("a", [9] * 5, max_tokens=24, stop_token_ids=(stop,))
    found = run(engine, {0: request})
    assert len(found.tokens["a", 0]) == expected
    assert found.receipts["a"].discarded == 1
    assert len(device.batches) == expected + 1


@pytest.mark.parametrize("choices", [1, 3])
def test_memory_pressure_leaves_the_answers_alone(choices: int) -> None:
    config = make_config(num_blocks=24, max_running=8, prefix_cache=False)
    engine = Engine(config, FakeRunner(config, overlapped=True), clock=Clock())
    requests = [
        ask(f"r{i}", [i + 2] * 9, max_tokens=20, n=choices, temperature=1.0, seed=i)
        for i in range(4)
    ]
    found = run(engine, dict(enumerate(requests)))
    assert engine.metrics.counters["preemptions"] > 0
    for request in requests:
        for choice, tokens in run_alone(request).items():
            assert found.tokens[request.request_id, choice] == tokens
