"""The engine's own scheduler on planned step times, in simulated time.

Requests arrive, queue, are admitted, chunked, batched and preempted by `engine.loop.Engine` itself; only
the runner computes nothing, and its clock goes on by what a step would take. Where nothing can happen
for some steps but one more token for each sequence (no arrival, no end, no prompt, blocks enough), these
steps are taken at once; `leaps=False` plays each, and gives the same receipts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.batch import LAST_SAMPLED, Row, Sampled, StepBatch
from engine.config import EngineConfig
from engine.loop import Engine
from engine.planning.step_times import Serving
from engine.protocol import GenerateRequest, Receipt, SamplingParams
from engine.runners.fake import FakeRunner
from engine.scheduling.sequence import Sequence as Decoding

_TOKEN = 5  # no token ends an answer before its length
_FILLER = [_TOKEN] * 4096
_LONGEST = 1 << 20

StepSeconds = Callable[[float, float, float, float], float]
"""Of a step: sequences that decode, their positions on average, prompt tokens, and those before them."""


def planned(serving: Serving) -> StepSeconds:
    """Step times of devices that are planned."""

    def _seconds(rows: float, context: float, tokens: float, before: float) -> float:
        decode = serving.decode_s(rows, context) if rows else 0.0
        if not tokens:
            return decode
        # A step of prompts alone reads the weights and starts the kernels too.
        return (decode or serving.decode_s(1, 1)) + serving.prompt_s(tokens, before)

    return _seconds


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(FakeRunner):
    """Samples one and the same token; a step takes what `seconds` says."""

    def __init__(self, config: EngineConfig, clock: _Clock, seconds: StepSeconds) -> None:
        super().__init__(config, context_length=1, eos=())
        self.info = replace(self.info, context_length=config.max_context or _LONGEST)
        self._clock = clock
        self._seconds = seconds

    def launch(self, batch: StepBatch) -> list[Sampled]:
        rows, positions, tokens, before = 0, 0, 0, 0
        found = []
        for row in batch.rows:
            count = len(row.tokens)
            if count == 1 and row.start >= row.prompt_len:
                rows += 1
                positions += row.start
            else:
                tokens += count
                before = max(before, row.start)
            if row.sample:
                found.append(Sampled(row.seq, [_TOKEN]))
        self._clock.now += self._seconds(rows, positions / rows if rows else 0.0, tokens, before)
        return found

    def _compute(self, row: Row) -> Sampled | None:
        return Sampled(row.seq, [_TOKEN]) if row.tokens[0] != LAST_SAMPLED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Poisson arrivals of requests whose lengths are uniform from half to one and a half times the mean
    (`spread` 0.5; 0: all alike). `tenants`: evenly; `shared`: tokens that all prompts begin with."""

    rate: float
    requests: int
    prompt: int
    output: int
    spread: float = 0.5
    shared: int = 0
    tenants: int = 1
    seed: int = 1

    def arrivals(self) -> Iterator[tuple[float, GenerateRequest]]:
        dice = random.Random(self.seed)
        at = 0.0
        prefix = [dice.randrange(10, 990) for _ in range(self.shared)]
        for number in range(self.requests):
            at += dice.expovariate(self.rate)
            own = max(1, self._length(dice, self.prompt) - self.shared)
            first = dice.randrange(10, 990)  # two prompts of a tenant are seldom the same
            prompt = [*prefix, first, number % 997, *_filler(own)[2:]]
            yield (
                at,
                GenerateRequest(
                    request_id=str(number),
                    namespace=f"tenant-{number % self.tenants}",
                    prompt=prompt,
                    sampling=SamplingParams(
                        self._length(dice, self.output), temperature=0.0, ignore_eos=True
                    ),
                ),
            )

    def _length(self, dice: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, round(mean * dice.uniform(1 - self.spread, 1 + self.spread)))


def _filler(count: int) -> list[int]:
    return _FILLER[:count] if count <= len(_FILLER) else [_TOKEN] * count


class Simulation:
    """One replica under a load. `receipts` are the engine's own, in the order in which they ended."""

    def __init__(self, config: EngineConfig, seconds: StepSeconds, *, leaps: bool = True) -> None:
        self.clock = _Clock()
        self._seconds = seconds
        self.engine = Engine(config, TimedRunner(config, self.clock, seconds), clock=self.clock)
        self.receipts: list[Receipt] = []
        self.steps = 0  # of the device
        self._leaps = leaps
        self._config = config

    def run(self, load: Load) -> list[Receipt]:
        coming = load.arrivals()
        following = next(coming, None)
        engine = self.engine
        while following is not None or engine.busy:
            while following is not None and following[0] <= self.clock.now:
                engine.submit(following[1], "simulation")
                following = next(coming, None)
            if self._leaps and self._leap(following[0] if following is not None else None):
                continue
            if engine.step():
                self.steps += 1
            elif following is not None:
                self.clock.now = following[0]
            for outbox in engine.take_outboxes().values():
                self.receipts.extend(outbox.receipts)
        engine.check_integrity()
        return self.receipts

    def _leap(self, until: float | None) -> bool:
        """Take all steps at once in which every sequence gets one more token and nothing else happens."""
        scheduler = self.engine.scheduler
        running = scheduler.running
        if not running or scheduler.waiting.size or self._config.prefix_cache:
            return False
        if not all(seq.decoding and not seq.pending for seq in running):
            return False
        steps = min(seq.request.inputs.sampling.max_tokens - seq.output_len for seq in running) - 1
        free = self.engine.pool.free_blocks - scheduler.capacity.margin()
        steps = min(steps, (free // len(running) - 1) * self._config.block_size)
        if steps < 2:
            return False
        taken = self._time_of(running, steps, until)
        if taken < 2:
            return False
        for seq in running:
            self._extend(seq, taken)
        self.steps += taken
        return True

    def _time_of(self, running: Sequence[Decoding], steps: int, until: float | None) -> int:
        """Advance the clock step by step, as far as the next arrival is not reached before the step."""
        rows = len(running)
        # Sums as a step has them, so that the clock is the same to the last bit.
        positions = sum(seq.computed for seq in running)
        now, seconds = self.clock.now, self._seconds
        taken = 0
        while taken < steps and (until is None or now < until):
            now += seconds(rows, positions / rows, 0.0, 0.0)
            positions += rows
            taken += 1
        if taken >= 2:
            self.clock.now = now
        return taken

    def _extend(self, seq: Decoding, count: int) -> None:
        scheduler, request = self.engine.scheduler, seq.request
        scheduler.tables.ensure(seq, force=False)
        seq.history.extend(_filler(count))
        seq.computed += count
        seq.counted_until = seq.computed
        scheduler.tables.ensure(seq, force=False)
        scheduler.waiting.charge(seq, count * self._config.output_price)
        request.generated += count
        request.delivered += count
        seq.last_token_at = self.clock.now


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds over the requests that ended; goodput counts those within both objectives, a second."""

    requests: int
    seconds: float
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    output_rate: float
    goodput: float
    preempted: int  # tokens that were computed again


def measured(
    receipts: Sequence[Receipt], seconds: float, ttft: float = 0, tpot: float = 0
) -> Measured:
    first = sorted(each.queue_s + each.prefill_s for each in receipts)
    later = sorted(each.decode_s / max(1, each.generated - 1) for each in receipts)
    good = sum(
        (not ttft or each.queue_s + each.prefill_s <= ttft)
        and (not tpot or each.decode_s / max(1, each.generated - 1) <= tpot)
        for each in receipts
    )
    count = len(receipts) or 1
    return Measured(
        requests=len(receipts),
        seconds=seconds,
        ttft_mean=sum(first) / count,
        ttft_p50=_share(first, 0.5),
        ttft_p95=_share(first, 0.95),
        tpot_mean=sum(later) / count,
        tpot_p95=_share(later, 0.95),
        output_rate=sum(each.generated for each in receipts) / seconds if seconds else 0.0,
        goodput=good / seconds if seconds else 0.0,
        preempted=sum(each.recomputed for each in receipts),
    )


def _share(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
