"""Who gets how much, on simulated traces: the VTC bound, weights, no idle credit, no starvation."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loop import Engine
from engine.scheduling.fairness import FairOrder, ServiceCounters
from tests.engine.helpers import Clock, Collected, ask, make_config, make_engine, write_adapter

PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0


class Trace:
    """An engine that is stepped with tenants kept backlogged, and what each has been served."""

    def __init__(self, **config: object) -> None:
        self.clock = Clock()
        self.config = make_config(
            **{"block_size": 4, "num_blocks": 128, "prefix_cache": False, **config}
        )
        self.engine: Engine = make_engine(self.config, self.clock, pause=self.pass_time)
        self.found = Collected()
        self.served: dict[str, float] = defaultdict(float)
        self._names = itertools.count()

    def submit(self, tenant: str, prompt_len: int, max_tokens: int, **changes: object) -> str:
        name = f"r{next(self._names)}"
        prompt = [(next(self._names) * 31 + i) % 999 + 1 for i in range(prompt_len)]
        changes.setdefault("prompt", prompt)
        prompt = changes.pop("prompt")
        self.engine.submit(ask(name, prompt, max_tokens, namespace=tenant, **changes), "g")
        return name

    def pass_time(self, _: object = None) -> None:
        self.clock.now += 0.05

    def waiting(self, tenant: str) -> int:
        return self.engine.scheduler.waiting.by_tenant.get(tenant, 0)

    def step(self) -> None:
        before = {n: self._cost(r) for n, r in self.engine.requests.items()}
        requests = dict(self.engine.requests)
        if not self.engine.step():
            self.pass_time()
        for name, request in requests.items():
            self.served[request.inputs.namespace] += self._cost(request) - before[name]
        self.found.take(self.engine)

    @staticmethod
    def _cost(request: object) -> float:
        return request.computed * PROMPT_PRICE + request.generated * OUTPUT_PRICE

    def run(self, steps: int, feed: dict[str, Callable[[], None]]) -> list[dict[str, float]]:
        """Step with every fed tenant backlogged; the service so far after each step."""
        history = []
        enough = 1 + self.config.max_running  # a step may begin, and end, as many of one tenant
        for _ in range(steps):
            for tenant, more in feed.items():
                while self.waiting(tenant) < enough:
                    more()
            self.step()
            history.append(dict(self.served))
        return history


def spread(history: list[dict[str, float]], one: str, two: str) -> float:
    """The largest difference of service over any interval of the trace."""
    gaps = [h.get(one, 0.0) - h.get(two, 0.0) for h in history]
    return max(gaps) - min(gaps)


shapes = st.tuples(st.integers(1, 60), st.integers(1, 40))


@given(
    first=st.lists(shapes, min_size=1, max_size=4),
    second=st.lists(shapes, min_size=1, max_size=4),
    max_running=st.integers(1, 8),
    max_batch_tokens=st.sampled_from([8, 16, 64]),
)
@settings(max_examples=25)
def test_two_backlogged_tenants_stay_within_the_vtc_bound(
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    max_running: int,
    max_batch_tokens: int,
) -> None:
    trace = Trace(max_running=max_running, max_batch_tokens=max_batch_tokens, locality_quantum=0.0)
    ones, twos = itertools.cycle(first), itertools.cycle(second)
    history = trace.run(
        250,
        {
            "one": lambda: trace.submit("one", *next(ones)),
            "two": lambda: trace.submit("two", *next(twos)),
        },
    )
    longest = max(prompt for prompt, _ in [*first, *second])
    in_batch = trace.config.num_blocks * trace.config.block_size
    bound = 2 * max(PROMPT_PRICE * longest, OUTPUT_PRICE * in_batch)
    assert spread(history, "one", "two") <= bound
    # The pool is generous; what really can be in a batch gives a far tighter bound.
    real = max_running * max(prompt + out for prompt, out in [*first, *second])
    assert spread(history, "one", "two") <= 2 * max(PROMPT_PRICE * longest, OUTPUT_PRICE * real)


@pytest.mark.parametrize(
    "weights",
    [
        (1.0, 2.0, 4.0),
        *(pytest.param(w, marks=pytest.mark.proof) for w in ((1.0, 1.0, 1.0), (0.5, 3.0, 1.5))),
    ],
)
def test_service_follows_the_weights_within_five_percent(
    weights: tuple[float, float, float],
) -> None:
    trace = Trace(max_running=6, max_batch_tokens=32)
    tenants = dict(zip("abc", weights, strict=True))
    trace.run(
        2000,
        {t: (lambda t=t, w=w: trace.submit(t, 12, 8, weight=w)) for t, w in tenants.items()},
    )
    total = sum(trace.served.values())
    for tenant, weight in tenants.items():
        share = weight / sum(weights)
        assert abs(trace.served[tenant] / total - share) <= 0.05 * share


def test_a_tenant_that_idled_gets_no_credit_for_it() -> None:
    trace = Trace(max_running=4, max_batch_tokens=32)
    busy = {"busy": lambda: trace.submit("busy", 10, 8)}
    both = {**busy, "late": lambda: trace.submit("late", 10, 8)}
    trace.run(800, busy)
    history = trace.run(400, both)
    assert spread(history, "busy", "late") <= 2 * OUTPUT_PRICE * 4 * 18
    trace.run(400, busy)  # late idles again
    history = trace.run(400, both)
    assert spread(history, "busy", "late") <= 2 * OUTPUT_PRICE * 4 * 18


def test_a_lone_tenant_earns_no_debt_that_a_newcomer_could_exploit() -> None:
    """When nobody waits, a newcomer starts level with whoever left last, not at nought."""
    levels = ServiceCounters()
    order = FairOrder(levels)
    order.join("one", lift=True)
    levels.charge("one", 500.0, 1.0)
    order.leave("one")
    order.join("two", lift=True)
    assert levels.of("two") == 500.0


def test_a_tenant_with_ten_adapters_has_one_share(tmp_path: Path) -> None:
    trace = Trace(max_running=4, max_batch_tokens=32, max_adapter_slots=12)
    digests = []
    for i in range(10):
        path, digest = write_adapter(tmp_path, f"a{i}")
        trace.engine.load_adapter(path)
        digests.append(digest)
    turn = itertools.cycle(digests)
    trace.run(
        1500,
        {
            "many": lambda: trace.submit("many", 10, 8, adapter=next(turn)),
            "plain": lambda: trace.submit("plain", 10, 8),
        },
    )
    assert abs(trace.served["many"] / trace.served["plain"] - 1) < 0.05


@given(
    shapes=st.lists(shapes, min_size=3, max_size=40),
    max_batch_tokens=st.sampled_from([8, 24]),
)
@settings(max_examples=40)
def test_work_is_conserved(shapes: list[tuple[int, int]], max_batch_tokens: int) -> None:
    """A step leaves budget unused only when nothing more could run."""
    trace = Trace(max_running=8, max_batch_tokens=max_batch_tokens, num_blocks=1024)
    for number, (prompt, out) in enumerate(shapes):
        trace.submit(f"t{number % 5}", prompt, out)
    scheduler = trace.engine.scheduler
    while trace.engine.busy:
        waiting_before = scheduler.waiting.size
        trace.step()
        used = sum(len(row.tokens) for _, row in scheduler.rows)
        if used < max_batch_tokens and len(scheduler.running) < 8:
            admitted = {seq for seq, _ in scheduler.rows}
            assert scheduler.waiting.size == 0 or len(admitted) == 8
        assert used > 0 or waiting_before == 0


def test_more_adapters_than_slots_starve_nobody(tmp_path: Path) -> None:
    """One adapter is kept busy for ever; the requests of eleven others come through regularly."""
    trace = Trace(max_running=6, max_adapter_slots=2, adapter_drain_s=0.5, num_blocks=256)
    digests = []
    for i in range(12):
        path, digest = write_adapter(tmp_path, f"a{i}", rank=4)
        trace.engine.load_adapter(path)
        digests.append(digest)
    hot, *rare = digests
    slowest = 0
    for digest in rare * 2:
        name = trace.submit("same", 6, 4, adapter=digest)
        for steps in itertools.count():
            while trace.waiting("same") < 4:
                trace.submit("same", 8, 12, adapter=hot)
            trace.step()
            if name in trace.found.receipts:
                break
            assert steps < 400, "starved"
        slowest = max(slowest, steps)
    assert trace.engine.metrics.counters["adapter_loads"] >= 22
    assert slowest < 100


def test_a_big_request_is_not_passed_for_ever_by_small_ones() -> None:
    trace = Trace(num_blocks=32, max_running=8, max_batch_tokens=64)
    feed = {"small": lambda: trace.submit("small", 4, 12)}
    trace.run(30, feed)
    name = trace.submit("big", 100, 8)
    for _ in range(300):
        trace.run(1, feed)
        if name in trace.found.receipts:
            return
    raise AssertionError("the big request starved")


def test_a_longer_cached_prefix_goes_first_within_the_quantum() -> None:
    def hits(quantum: float) -> tuple[int, float]:
        trace = Trace(
            prefix_cache=True,
            num_blocks=40,
            max_running=2,
            max_batch_tokens=64,
            locality_quantum=quantum,
        )
        families = itertools.cycle(range(4))

        def more(tenant: str) -> None:
            family = next(families)
            prompt = [family * 100 + i + 1 for i in range(60)] + [next(trace._names) % 900 + 1]
            trace.submit(tenant, 61, 2, prompt=prompt)

        for _ in range(6):
            more("one")
            more("two")
        history = trace.run(300, {"one": lambda: more("one"), "two": lambda: more("two")})
        cached = sum(r.cached for r in trace.found.receipts.values())
        return cached, spread(history, "one", "two")

    plain, _ = hits(0.0)
    local, gap = hits(200.0)
    assert local > plain * 1.3
    assert gap <= 2 * max(61.0, OUTPUT_PRICE * 160) + 2 * 200.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_charges_are_what_the_receipts_say(overlapped: bool) -> None:
    clock = Clock()
    config = make_config(num_blocks=20, max_batch_tokens=16)
    engine = make_engine(config, clock, overlapped=overlapped)
    for number in range(12):
        engine.submit(ask(f"r{number}", [number + 1] * 14, 10, weight=2.0, ignore_eos=False), "g")
    found = Collected()
    launch, calls = engine._runner.launch, itertools.count()

    def sometimes_broken(batch: object) -> object:
        if next(calls) == 9:
            raise RuntimeError("once")
        return launch(batch)

    engine._runner.launch = sometimes_broken
    for step in range(400):
        if step == 7:
            engine.abort("r3")
        engine.step()
        found.take(engine)
    assert not engine.busy
    cost = sum(
        (r.computed + r.rejected) * config.prompt_price
        + r.cached * config.cached_price
        + r.generated * config.output_price
        for r in found.receipts.values()
    )
    assert engine.scheduler.waiting._counters.of("acme") == pytest.approx(cost / 2.0)


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    trace = Trace(max_running=2)
    low = [trace.submit("batch", 8, 60, priority=-1) for _ in range(3)]
    trace.step()
    high = trace.submit("live", 8, 4)
    for _ in range(8):
        trace.step()
    assert trace.found.receipts[high].finish_reason == "length"
    while trace.engine.busy:
        trace.step()
    assert all(trace.found.receipts[name].generated == 60 for name in low)


def test_who_would_miss_a_deadline_by_starting_again_is_not_preempted() -> None:
    trace = Trace(num_blocks=16, max_running=2, fairness="fcfs")
    trace.submit("t", 20, 40)
    urgent = trace.submit("t", 20, 40, deadline_s=0.05 * 46)
    while trace.engine.busy:
        trace.step()
    assert trace.engine.metrics.counters["preemptions"] > 0
    assert trace.found.receipts[urgent].finish_reason == "length"
    assert trace.found.receipts[urgent].recomputed == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.floats(0, 50))))
def test_the_lazy_heap_gives_the_order_that_sorting_gives(
    actions: list[tuple[str, int, float]],
) -> None:
    levels, waiting = ServiceCounters(), set()
    order = FairOrder(levels)
    for tenant, action, amount in actions:
        if action == 0 and tenant not in waiting:
            order.join(tenant, lift=True)
            waiting.add(tenant)
        elif action == 1 and tenant in waiting:
            order.leave(tenant)
            waiting.discard(tenant)
        elif action == 2:
            levels.charge(tenant, amount, 1.0)
        elif action == 3:
            levels.charge(tenant, -amount, 1.0)
            order.lowered(tenant)
        first = order.first(10)
        assert set(first) == waiting
        assert [levels.of(t) for t in first] == sorted(levels.of(t) for t in waiting)
        assert order.first(2) == first[:2]


def test_counters_of_long_idle_tenants_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.waiting.PRUNE_AT", 50)
    trace = Trace(num_blocks=1024, max_running=4)
    trace.engine.scheduler.waiting._prune_at = 50
    for number in range(300):
        trace.submit(f"t{number}", 4, 2)
        trace.step()
    assert len(trace.engine.scheduler.waiting._counters) < 120
