"""Who gets which request: the product's own router over simulated replicas, against round robin and
least-loaded.

A multi-tenant trace (shared system prompts, conversations of several turns, adapters) is replayed
over replicas that run the engine's own scheduler, block pool and prefix cache; only the model is
replaced, by a cost of each step: about an 8B model on one large GPU. Time is simulated, so the
machine does not matter. Cached and prompt tokens are those of the engines' receipts.
"""

import argparse
import heapq
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fairness import p99
from benchmarks.report import figure, progress
from core.clock import FakeClock
from engine.adapters.digest import adapter_digest
from engine.batch import AdapterHandle, Row, Sampled, StepBatch
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    KvEvent,
    Receipt,
    SamplingParams,
)
from engine.runners.fake import FakeRunner
from gateway.catalog.catalog import NamedAdapter, ServedModel, Target
from gateway.engines.routing.router import Query, Route, Router
from gateway.prompts.prompt import Prompt
from gateway.request.engine import StartupProgress
from gateway.request.inference import InferenceRequest

MODEL = "m"
ANSWER = 7  # the token that every answer consists of
HEARTBEAT_S = 1.0  # the engine's own; routers see load that old
ADAPTER_COPY_S = 0.03  # from host memory to the device
Event = tuple[float, int, Callable[[], None]]


@dataclass(frozen=True)
class Turn:
    at: float
    tenant: str
    prompt: list[int]
    messages: list[dict[str, str]]
    output: int
    adapter: str | None


@dataclass(frozen=True)
class Trace:
    """Tenants come by a power law; each has a system prompt, and conversations that grow."""

    seconds: float
    rate: float  # conversations a second
    tenants: int
    adapters: int  # tenants that use one
    seed: int

    def turns(self, digests: Sequence[str]) -> list[Turn]:
        dice = random.Random(self.seed)
        systems = [_words(dice, dice.randint(400, 2400)) for _ in range(self.tenants)]
        weights = [1 / (rank + 1) ** 0.8 for rank in range(self.tenants)]
        found: list[Turn] = []
        at = dice.expovariate(self.rate)
        while at < self.seconds:
            tenant = dice.choices(range(self.tenants), weights)[0]
            adapter = digests[tenant] if tenant < self.adapters else None
            found += _conversation(dice, at, f"tenant-{tenant}", systems[tenant], adapter)
            at += dice.expovariate(self.rate)
        return sorted((t for t in found if t.at < self.seconds), key=lambda turn: turn.at)


def _conversation(
    dice: random.Random, at: float, tenant: str, system: list[int], adapter: str | None
) -> list[Turn]:
    prompt, messages = list(system), [{"role": "system", "content": tenant}]
    found = []
    for _ in range(min(8, 1 + int(dice.expovariate(0.4)))):
        said = _words(dice, dice.randint(20, 200))
        prompt, messages = prompt + said, [*messages, {"role": "user", "content": str(said)}]
        output = dice.randint(20, 160)
        if len(prompt) + output > 4000:
            break
        found.append(Turn(at, tenant, prompt, messages, output, adapter))
        prompt = prompt + [ANSWER] * output
        messages = [*messages, {"role": "assistant", "content": f"{output} tokens"}]
        at += 2.0 + dice.expovariate(1 / 6.0)
    return found


def _words(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(10, 30_000) for _ in range(count)]


class CostOnly(FakeRunner):
    """Time passes, and every token is the same."""

    now = 0.0

    def _compute(self, row: Row) -> Sampled | None:
        return Sampled(row.seq, [ANSWER]) if row.sample else None

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None:
        super().load_adapter(handle, blocks)
        self.now += ADAPTER_COPY_S

    def spend(self, batch: StepBatch) -> None:
        tokens = sum(len(row.tokens) for row in batch.rows)
        self.now += 0.008 + 0.00002 * tokens + 0.00001 * len(batch.rows)


class SimulatedEngine:
    """An engine client for the router, and the engine behind it. What the router sees of it is as
    old as it is in production: heartbeats a second apart, events at the end of their step."""

    speaks_text = False

    def __init__(self, name: str, config: EngineConfig, adapters: Sequence[Path]) -> None:
        self.engine_id = name
        self.runner = CostOnly(config, vocab_size=30_000)
        self.runner._pause = self.runner.spend
        self.engine = Engine(config, self.runner, clock=lambda: self.runner.now)
        self.engine.info = replace(self.engine.info, engine_id=name)
        for path in adapters:
            self.engine.load_adapter(str(path))
        self.engine.pool.events = []
        self._adapters = {state.digest: state for state in self.engine.adapters.states()}
        self._stats = self.engine.stats()

    def beat(self) -> None:
        self._stats = self.engine.stats()
        self._adapters = {state.digest: state for state in self._stats.adapters}

    def info(self) -> EngineInfo | None:
        return self.engine.info

    def stats(self) -> EngineStats | None:
        return self._stats

    def healthy(self) -> bool:
        return True

    def silent(self) -> bool:
        return False

    def last_output(self) -> float:
        return 0.0

    def startup_progress(self) -> StartupProgress | None:
        return None

    def adapters(self) -> dict[str, AdapterState]:
        return self._adapters


@dataclass
class Sent:
    turn: Turn
    replica: int
    route: Route | None
    first: float | None = None


@dataclass
class Run:
    """One policy over the whole trace."""

    policy: str
    engines: list[SimulatedEngine]
    events: list[Event] = field(default_factory=list)
    sent: dict[str, Sent] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._order = itertools.count()
        self._in_flight = [0] * len(self.engines)
        self._clock = FakeClock()
        self._router = Router(self._clock)
        self._router.serve_by({MODEL: self.engines})  # type: ignore[dict-item]
        self._model = ServedModel(MODEL, object(), 4096, 0)  # type: ignore[arg-type]
        self._turns = itertools.cycle(range(len(self.engines)))

    def play(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._later(turn.at, lambda turn=turn: self._arrive(turn))  # type: ignore[misc]
        self._later(HEARTBEAT_S, self._beat)
        self._open = len(turns)
        while self._open:
            busy = [e for e in self.engines if e.engine.busy]
            engine = min(busy, key=lambda e: e.runner.now, default=None)
            if engine is None or (self.events and self.events[0][0] <= engine.runner.now):
                self.now, _, act = heapq.heappop(self.events)
                act()
            else:
                self._step(engine)

    def _arrive(self, turn: Turn) -> None:
        name = f"r{len(self.sent)}"
        chosen, route = self._choose(turn)
        engine = self.engines[chosen]
        self.sent[name] = Sent(turn, chosen, route)
        self._in_flight[chosen] += 1
        engine.runner.now = max(engine.runner.now, self.now)
        sampling = SamplingParams(turn.output, temperature=0.0, ignore_eos=True)
        asked = GenerateRequest(name, turn.tenant, turn.prompt, sampling, turn.adapter)
        engine.engine.submit(asked, "gateway")

    def _choose(self, turn: Turn) -> tuple[int, Route | None]:
        if self.policy == "round robin":
            return next(self._turns), None
        if self.policy == "least-loaded":
            return self._in_flight.index(min(self._in_flight)), None
        adapter = (
            NamedAdapter("a", MODEL, turn.adapter, "", self._clock.now()) if turn.adapter else None
        )
        ask = InferenceRequest("/v1/chat/completions", MODEL, messages=list(turn.messages))
        target = Target(MODEL, self._model, adapter)
        query = Query(target, Prompt(ask, turn.prompt, turn.output), turn.tenant)
        route = self._router.route(query)
        place = route.next()
        assert place is not None
        route.sent()
        return next(i for i, e in enumerate(self.engines) if e.engine_id == place.name), route

    def _step(self, engine: SimulatedEngine) -> None:
        engine.engine.step()
        ended = engine.runner.now
        kv_events: list[KvEvent] = engine.engine.take_events()
        for outbox in engine.engine.take_outboxes().values():
            for chunk in outbox.chunks:
                sent = self.sent[chunk.request_id]
                if sent.first is None:
                    sent.first = ended
                    self.first_token_s.append(ended - sent.turn.at)
                    if sent.route is not None:
                        self._later(ended, sent.route.first_token)
            for receipt in outbox.receipts:
                self._later(ended, lambda receipt=receipt: self._end(receipt))  # type: ignore[misc]
        if kv_events and self.policy == "ours":
            self._later(ended, lambda: self._router.index.apply(engine.engine_id, kv_events))

    def _end(self, receipt: Receipt) -> None:
        sent = self.sent[receipt.request_id]
        self._in_flight[sent.replica] -= 1
        if sent.route is not None:
            sent.route.answered()
            sent.route.left(receipt)
        self.receipts.append(receipt)
        self._open -= 1
        if len(self.receipts) % 500 == 0:
            progress(f"  {self.policy}: {len(self.receipts)} requests done at {self.now:.0f} s")

    def _beat(self) -> None:
        for engine in self.engines:
            engine.beat()
        self._later(self.now + HEARTBEAT_S, self._beat)

    def _later(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at, next(self._order), act))


def make_adapters(folder: Path, count: int) -> list[Path]:
    made = []
    for number in range(count):
        path = folder / f"adapter-{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"r": 16}))
        (path / "adapter_model.safetensors").write_bytes(f"weights {number}".encode())
        made.append(path)
    return made


def measure(policy: str, trace: Trace, replicas: int, blocks: int) -> dict[str, float]:
    config = EngineConfig(
        model="fake",
        num_blocks=blocks,
        max_waiting=1_000_000,
        max_waiting_per_tenant=1_000_000,
        max_adapter_slots=8,
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = make_adapters(Path(folder), trace.adapters)
        engines = [SimulatedEngine(f"engine-{i}", config, paths) for i in range(replicas)]
        digests = [adapter_digest(path) for path in paths]
        run = Run(policy, engines)
        turns = trace.turns(digests)
        run.play(turns)
        for engine in engines:
            engine.engine.check_integrity()
    assert len(run.receipts) == len(turns) == len(run.first_token_s)
    per_replica = [sum(s.replica == i for s in run.sent.values()) for i in range(replicas)]
    return {
        "requests": len(turns),
        "hit_rate": sum(r.cached for r in run.receipts) / sum(r.prompt for r in run.receipts),
        "p50_s": sorted(run.first_token_s)[len(turns) // 2],
        "p99_s": p99(run.first_token_s),
        "adapter_loads": sum(e.engine.metrics.counters["adapter_loads"] for e in engines),
        "busiest_share": max(per_replica) / len(turns),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--rate", type=float, default=60.0, help="conversations a second")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=96)
    parser.add_argument("--adapters", type=int, default=24, help="tenants that use an adapter")
    parser.add_argument("--blocks", type=int, default=4096, help="of KV a replica, 16 tokens each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    trace = Trace(options.seconds, options.rate, options.tenants, options.adapters, options.seed)
    found = {
        policy: measure(policy, trace, options.replicas, options.blocks)
        for policy in ("ours", "least-loaded", "round robin")
    }
    settings: dict[str, Any] = {"time": "simulated", **vars(options), **found}
    for peer in ("round robin", "least-loaded"):
        figure(
            "routing.hit_rate",
            found["ours"]["hit_rate"],
            "share of prompt tokens",
            True,
            peer,
            found[peer]["hit_rate"],
            at_least=1.4,
            aim=1.7,
            settings=settings,
        )
        figure(
            "routing.first_token_p99",
            found["ours"]["p99_s"],
            "s",
            False,
            peer,
            found[peer]["p99_s"],
            at_least=1.5,
            aim=5.0,
            settings=settings,
        )


if __name__ == "__main__":
    main()
