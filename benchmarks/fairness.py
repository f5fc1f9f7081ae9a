"""One tenant floods with 100 times the load of each of nine others: what do the nine feel, and what
does fairness cost, against first come, first served?

By default in simulated time over the engine's own scheduler, with a cost model of a step; with
`--model DIR` on the real runner of this machine, in real time.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.report import figure, progress
from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, Receipt, SamplingParams
from engine.runners.fake import FakeRunner
from engine.worker.server import make_runner

QUIET = 9
FLOOD = 100  # times a quiet tenant's load


@dataclass(frozen=True)
class Work:
    """Poisson arrivals; lengths are uniform from half to one and a half times the mean."""

    seconds: float
    rate: float  # requests a second of a quiet tenant
    prompt: int
    output: int
    seed: int

    def arrivals(self) -> list[tuple[float, GenerateRequest]]:
        dice = random.Random(self.seed)
        found: list[tuple[float, GenerateRequest]] = []
        for tenant in range(QUIET + 1):
            name = f"quiet-{tenant}" if tenant < QUIET else "flood"
            rate = self.rate * (1 if tenant < QUIET else FLOOD)
            at = dice.expovariate(rate)
            while at < self.seconds:
                found.append((at, self._request(dice, name, len(found))))
                at += dice.expovariate(rate)
        return sorted(found, key=lambda pair: pair[0])

    def _request(self, dice: random.Random, tenant: str, number: int) -> GenerateRequest:
        def around(mean: int) -> int:
            return max(1, round(mean * dice.uniform(0.5, 1.5)))

        return GenerateRequest(
            request_id=f"{tenant}-{number}",
            namespace=tenant,
            prompt=[dice.randrange(3, 250) for _ in range(around(self.prompt))],
            sampling=SamplingParams(around(self.output), temperature=0.0, ignore_eos=True),
        )


class SimulatedClock:
    """A step takes its launch, its tokens and its rows: about an 8B model on one large GPU."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, batch: StepBatch) -> None:
        tokens = sum(len(row.tokens) for row in batch.rows)
        self.now += 0.008 + 0.00002 * tokens + 0.00001 * len(batch.rows)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Outcome:
    quiet_p99_s: float
    flood_p99_s: float
    tokens_per_s: float


def make_engine(fairness: str, model: str | None) -> tuple[Engine, Any, Callable[[float], None]]:
    config = EngineConfig(
        model=model or "fake",
        num_blocks=4096,
        max_running=64,
        max_batch_tokens=2048,
        max_waiting=1_000_000,
        max_waiting_per_tenant=1_000_000,
        prefix_cache=False,
        fairness=fairness,
    )
    if model is not None:
        return Engine(config, make_runner(config, fake=False)), time.monotonic, time.sleep
    clock = SimulatedClock()
    runner = FakeRunner(config, pause=clock.spend)
    return Engine(config, runner, clock=clock), clock, clock.sleep


def measure(fairness: str, work: Work, model: str | None) -> Outcome:
    engine, clock, sleep = make_engine(fairness, model)
    coming = work.arrivals()[::-1]
    receipts: list[Receipt] = []
    start, said = clock(), 0
    while coming or engine.busy:
        while coming and coming[-1][0] <= clock() - start:
            engine.submit(coming.pop()[1], "benchmark")
        if not engine.step() and coming:
            sleep(max(0.0, coming[-1][0] - (clock() - start)))
        for outbox in engine.take_outboxes().values():
            receipts.extend(outbox.receipts)
        if len(receipts) - said >= 1000:
            said = len(receipts)
            progress(f"  {fairness}: {said} requests done at {clock() - start:.1f} s")
    engine.check_integrity()
    spent = clock() - start
    quiet = [r for r in receipts if r.namespace != "flood"]
    return Outcome(
        quiet_p99_s=p99([r.queue_s + r.prefill_s for r in quiet]),
        flood_p99_s=p99([r.queue_s + r.prefill_s for r in receipts if r.namespace == "flood"]),
        tokens_per_s=sum(r.generated for r in receipts) / spent,
    )


def overload(options: argparse.Namespace) -> float:
    """A quiet tenant's rate at which all of them ask a fifth more than the runner can do."""
    crowd = Work(1.0, 128 / (QUIET + FLOOD), options.prompt, options.output, options.seed)
    capacity = measure("fcfs", crowd, options.model).tokens_per_s / options.output
    progress(f"  the runner does {capacity:.2f} requests/s")
    return 1.2 * float(capacity) / (QUIET + FLOOD)


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint directory: run on the real runner")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
    parser.add_argument(
        "--rate",
        type=float,
        help="requests a second of a quiet tenant; with --model, by default a little more in all "
        "than the machine can do",
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    rate = options.rate or (overload(options) if options.model else 1.0)
    work = Work(options.seconds, rate, options.prompt, options.output, options.seed)
    outcomes = {name: measure(name, work, options.model) for name in ("vtc", "fcfs")}
    fair, plain = outcomes["vtc"], outcomes["fcfs"]
    settings = {
        "time": "real" if options.model else "simulated",
        "model": options.model,
        "quiet_tenants": QUIET,
        "flood_times": FLOOD,
        "rate": rate,
        "seconds": work.seconds,
        "prompt": work.prompt,
        "output": work.output,
        "flood_p99_first_token_s": {"vtc": fair.flood_p99_s, "fcfs": plain.flood_p99_s},
    }
    figure(
        "fairness.quiet_first_token_p99",
        fair.quiet_p99_s,
        "s",
        False,
        "first come, first served",
        plain.quiet_p99_s,
        at_least=5.0,
        aim=20.0,
        settings=settings,
    )
    figure(
        "fairness.throughput",
        fair.tokens_per_s,
        "tok/s",
        True,
        "first come, first served",
        plain.tokens_per_s,
        at_least=0.97,
        aim=1.0,
        settings=settings,
    )


if __name__ == "__main__":
    main()
