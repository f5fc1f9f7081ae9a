"""What a decoding step costs the engine's host, by the length of the context: `python -m
benchmarks.step_cost`. Scheduler, blocks, results and receipts run as they do before a device, and the
device's work is left out. Processor time of the process, the least of several rounds that take turns,
as a ratio to that of the shortest context; the aim of 1 says that nothing grows with the context.
"""

import time
from dataclasses import replace

from benchmarks.report import figure, progress
from engine.batch import Sampled, StepBatch
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.fake import FakeRunner
from engine.scheduling.sequence import Sequence

CONTEXTS = (1, 4, 16, 64, 128)  # thousands of tokens, of 1,024
ROWS, STEPS, ROUNDS = 8, 60, 25
MOST, AIM = 1.1, 1.0


class Instant(FakeRunner):
    """Computes nothing: only the host's work is left."""

    def launch(self, batch: StepBatch) -> list[Sampled]:
        return [Sampled(row.seq, [5]) for row in batch.rows if row.sample]


def engine_of(config: EngineConfig) -> Engine:
    """An engine whose runner has no memory to fill, however many blocks there are."""
    small = FakeRunner(replace(config, num_blocks=2), context_length=16)
    runner = Instant.__new__(Instant)
    runner.__dict__.update(small.__dict__)
    runner.info = replace(
        small.info, context_length=config.max_context or 0, num_blocks=config.num_blocks or 0
    )
    runner.overlapped = True
    return Engine(config, runner)


def decoding(context: int) -> Engine:
    """One in which `ROWS` sequences with so many tokens each are past their prompts."""
    longest = context + (ROUNDS + 2) * STEPS
    config = EngineConfig(
        model="fake",
        num_blocks=ROWS * longest // 16,
        max_context=longest,
        max_batch_tokens=ROWS * context,
        max_running=ROWS,
        step_s=0.0,
    )
    engine = engine_of(config)
    sampling = SamplingParams(max_tokens=(ROUNDS + 1) * STEPS, temperature=0.0, ignore_eos=True)
    for row in range(ROWS):
        prompt = [7 + row] * context
        engine.submit(GenerateRequest(f"r{row}", "acme", prompt, sampling), "g")
    while any(each.computed < context for each in _sequences(engine)):
        _step(engine)
    for _ in range(40):  # the prompt is read for repeats, over some steps
        _step(engine)
    return engine


def _sequences(engine: Engine) -> list[Sequence]:
    return [each for request in engine.requests.values() for each in request.sequences]


def _timed(engine: Engine) -> float:
    began = time.process_time()
    for _ in range(STEPS):
        _step(engine)
    return time.process_time() - began


def _step(engine: Engine) -> None:
    engine.step()
    engine.take_outboxes()


def main() -> None:
    engines = {thousands: decoding(thousands * 1024) for thousands in CONTEXTS}
    rounds = [{each: _timed(engine) for each, engine in engines.items()} for _ in range(ROUNDS)]
    assert all(len(_sequences(engine)) == ROWS for engine in engines.values()), "none has ended"
    found = {each: min(spent[each] for spent in rounds) / STEPS * 1e6 for each in CONTEXTS}
    for thousands, spent in found.items():
        progress(f"{thousands}k: {spent:.0f} us a step of {ROWS} rows")
    told = {f"us_at_{thousands}k": round(spent, 1) for thousands, spent in found.items()}
    worst = max(found.values()) / found[CONTEXTS[0]]
    figure(
        "step_cost.longest_to_shortest_context",
        worst,
        "times",
        False,
        at_least=MOST,
        aim=AIM,
        settings={"rows": ROWS, "steps": STEPS, "rounds": ROUNDS} | told,
    )


if __name__ == "__main__":
    main()
