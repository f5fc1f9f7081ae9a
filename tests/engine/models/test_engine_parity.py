"""The whole engine over a real model: chunks, cache hits, preemption, forks and adapters in one
batch change no token of what each request gets alone."""

import random
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import VOCAB, save_adapter, save_checkpoint
from tests.engine.helpers import ask, run_until_idle


def make_real(
    checkpoint: Path, adapters: list[Path], **changes: object
) -> tuple[Engine, list[str]]:
    config = EngineConfig(model=str(checkpoint), dtype="float32", threads=1, **changes)
    engine = Engine(config, load_runner(config))
    return engine, [engine.load_adapter(str(path)).digest for path in adapters]


@pytest.mark.parametrize("seed", [1])
def test_a_crowded_engine_answers_as_a_lone_one(seed: int, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base")
    adapters = [
        save_adapter(checkpoint, tmp_path / f"a{rank}", rank, seed=rank) for rank in (2, 8, 5)
    ]
    crowded, digests = make_real(
        checkpoint,
        adapters,
        num_blocks=30,
        max_batch_tokens=24,
        max_running=4,
        max_adapter_slots=2,
        adapter_drain_s=0.0,
    )
    dice = random.Random(seed)
    stem = [dice.randrange(3, VOCAB) for _ in range(40)]
    asks: list[GenerateRequest] = []
    for number in range(16):
        tail = [dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 30))]
        sampled = number % 4 == 0
        asks.append(
            ask(
                f"r{number}",
                (stem if number % 4 else []) + tail,
                max_tokens=dice.randrange(8, 30),
                temperature=0.8 if sampled else 0.0,
                seed=number,
                n=2 if sampled else 1,
                namespace="t",
                adapter=dice.choice([None, *digests]),
                priority=int(number >= 13),  # these preempt
            )
        )
    for one in asks[:-3]:
        crowded.submit(one, "g")
    for _ in range(12):
        crowded.step()
    for one in asks[-3:]:
        crowded.submit(one, "g")
    together = run_until_idle(crowded)
    alone, _ = make_real(checkpoint, adapters, num_blocks=256, prefix_cache=False)
    for one in asks:
        alone.submit(one, "g")
        found = run_until_idle(alone)
        for choice in range(one.sampling.n):
            name = (one.request_id, choice)
            assert together.tokens[name] == found.tokens[name], f"{name} of {one.adapter}"
    receipts = together.receipts.values()
    assert crowded.metrics.counters["preemptions"] > 0
    assert sum(r.cached for r in receipts) > 0
    assert crowded.metrics.counters["adapter_loads"] > 3
