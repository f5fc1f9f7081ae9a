"""Random arrivals, aborts, deadlines, memory pressure and adapter churn: whatever happens, every
answer is the one that the request gets alone, every count agrees, and everything is given back."""

import random
from pathlib import Path

import pytest

from engine.cache.parts import Windowed
from engine.errors import AdapterError, RequestError
from engine.loop import Engine
from engine.model_spec import Sight
from engine.protocol import GenerateRequest
from tests.engine.helpers import (
    Clock,
    Collected,
    ask,
    make_config,
    make_engine,
    reference,
    run_alone,
    run_until_idle,
    write_adapter,
)

PUBLIC = tuple(range(100, 112))


class Storm:
    """Drives one engine with random events from one seed."""

    def __init__(self, seed: int, folder: Path, windowed: bool = False) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        dice = self.dice
        config = make_config(
            num_blocks=dice.choice([24, 30, 40, 90]),
            block_size=dice.choice([2, 4]),
            max_batch_tokens=dice.choice([8, 24, 64]),
            max_running=dice.choice([3, 8]),
            max_adapter_slots=dice.choice([1, 2, 3]),
            host_adapter_bytes=dice.choice([500, 1 << 20]),
            adapter_drain_s=dice.choice([0.0, 0.5]),
            prefix_cache=dice.random() < 0.8,
            public_prefixes=(PUBLIC,),
            cache_floor_blocks=dice.choice([0, 2]),
            cache_cap_blocks=dice.choice([None, 6]),
            fairness=dice.choice(["vtc", "vtc", "fcfs"]),
            locality_quantum=dice.choice([0.0, 50.0]),
        )
        overlapped = dice.random() < 0.5
        rest, pages = 1 + seed % 3, seed // 2 % 2
        shape = Windowed(Sight(seed % 4 * 7 + 1), frozenset(range(1 + seed % 5)), 1 if pages else rest,
                         config.num_blocks or 0, rest * pages) if windowed else None  # fmt: skip
        self.engine: Engine = make_engine(config, self.clock, overlapped=overlapped, windowed=shape)
        self.paths = dict(write_adapter(folder, f"a{i}", 2 + 3 * i)[::-1] for i in range(6))
        self.loaded: set[str] = set()
        self.asked: dict[str, GenerateRequest] = {}
        self.found = Collected()
        for digest in sorted(self.paths)[:4]:
            self.engine.load_adapter(self.paths[digest])
            self.loaded.add(digest)
        self.fail_next = False
        launch = self.engine._runner.launch

        def sometimes_broken(batch: object) -> object:
            if self.fail_next:
                self.fail_next = False
                raise RuntimeError("no luck")
            return launch(batch)

        self.engine._runner.launch = sometimes_broken

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.clock.now += self.dice.random() * 0.1
            self.event()
            self.engine.step()
            self.found.take(self.engine)
            if step % 3 == 0:
                self.engine.check_integrity()
        self.loaded and self.unload(self.dice.choice(sorted(self.loaded)))
        run_until_idle(self.engine, self.found, steps=20000)

    def event(self) -> None:
        roll = self.dice.random()
        if roll < 0.3:
            self.arrive()
        elif roll < 0.33 and self.engine.requests:
            self.engine.abort(self.dice.choice(sorted(self.engine.requests)))
        elif roll < 0.4:
            digest = self.dice.choice(sorted(self.paths))
            self.engine.load_adapter(self.paths[digest])
            self.loaded.add(digest)
        elif roll < 0.43 and self.loaded:
            self.unload(self.dice.choice(sorted(self.loaded)))
        elif roll < 0.432:
            self.fail_next = True

    def unload(self, digest: str) -> None:
        self.engine.unload_adapter(digest)
        self.loaded.discard(digest)

    def arrive(self) -> None:
        dice = self.dice
        name = f"r{len(self.asked)}"
        family = dice.randrange(2)  # prompts of one family share beginnings
        length = dice.choice([3, 12, 20, 30])
        prompt = list(PUBLIC) if dice.random() < 0.3 else []
        prompt += [family * 50 + i % 40 + 1 for i in range(length)]
        if dice.random() < 0.15:
            prompt.append(dice.randrange(1000))
        n = dice.choice([1, 1, 1, 2, 3])
        request = ask(
            name,
            prompt,
            max_tokens=dice.randrange(1, 25),
            n=n,
            temperature=1.0 if n > 1 else 0.0,
            seed=dice.randrange(100),
            ignore_eos=dice.random() < 0.5,
            min_tokens=0,
            stop_token_ids=tuple(dice.sample(range(1000), 40)),
            namespace=f"t{dice.randrange(3)}",
            weight=dice.choice([0.5, 1.0, 3.0]),
            priority=dice.choice([0, 0, 0, 1]),
            adapter=dice.choice([None, None, None, *sorted(self.paths)]),
            deadline_s=dice.choice([None, None, None, 0.3, 2.0]),
        )
        try:
            self.engine.submit(request, f"g{dice.randrange(2)}")
        except (RequestError, AdapterError):
            return
        self.asked[name] = request


def check_answers(storm: Storm) -> None:
    assert storm.found.receipts.keys() == storm.asked.keys()
    for name, request in storm.asked.items():
        receipt = storm.found.receipts[name]
        if receipt.finish_reason == "error":
            assert "no luck" in receipt.message
        for choice in range(request.sampling.n):
            got = storm.found.tokens.get((name, choice), [])
            assert got == reference(request, choice, len(got)), f"{name} differs from alone"
            reason = storm.found.reasons.get((name, choice))
            if reason == "stop":
                assert got[-1] in (0, *request.sampling.stop_token_ids)
            stops = {*request.sampling.stop_token_ids}
            stops |= set() if request.sampling.ignore_eos else {0}
            assert not stops & set(got[:-1]), "it went on after its end"


def check_counts(storm: Storm) -> None:
    receipts = storm.found.receipts.values()
    for receipt in receipts:
        asked = storm.asked[receipt.request_id]
        assert receipt.cached + receipt.computed == receipt.prompt
        assert receipt.prompt + receipt.unprocessed == len(asked.prompt)
        if receipt.finish_reason in ("stop", "length"):
            assert receipt.unprocessed == 0
        told = sum(
            len(t) for (name, _), t in storm.found.tokens.items() if name == receipt.request_id
        )
        assert receipt.generated == receipt.delivered == told
    counters = storm.engine.metrics.counters
    for counter, field in {
        "prompt_tokens": "prompt",
        "cached_tokens": "cached",
        "computed_tokens": "computed",
        "unprocessed_tokens": "unprocessed",
        "generated_tokens": "generated",
        "delivered_tokens": "delivered",
        "recomputed_tokens": "recomputed",
        "discarded_tokens": "discarded",
        "rejected_tokens": "rejected",
    }.items():
        assert counters[counter] == sum(getattr(r, field) for r in receipts), counter
    assert sum(storm.engine.metrics.finished.values()) == len(storm.asked)


def check_all_returned(storm: Storm) -> None:
    engine = storm.engine
    for digest in sorted(storm.loaded):
        engine.unload_adapter(digest)
    engine.check_integrity()
    assert not engine.adapters.known
    assert engine.pool.free_blocks == engine.pool.num_blocks
    assert engine.pool.available("anyone", force=True) == engine.pool.num_blocks
    assert not engine._runner._host
    assert not engine._runner._last
    assert engine.scheduler.waiting.size == engine.scheduler.waiting.tokens == 0
    assert not engine.scheduler.waiting.choices and not engine.scheduler.waiting.weights


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.proof) for n in range(4, 20))]
)
def test_a_storm_leaves_every_answer_and_every_count_right(
    seed: int, windowed: bool, tmp_path: Path
) -> None:
    storm = Storm(seed, tmp_path, windowed)
    storm.run(steps=400)
    check_answers(storm)
    check_counts(storm)
    check_all_returned(storm)


def test_the_storms_do_meet_what_they_are_for(tmp_path: Path) -> None:
    preempted = discarded = cached = reloaded = 0
    reasons: set[str] = set()
    for seed in range(8):
        storm = Storm(seed, tmp_path / str(seed))
        storm.run(steps=250)
        preempted += storm.engine.metrics.counters["preemptions"]
        reloaded += storm.engine.metrics.counters["adapter_loads"]
        discarded += sum(r.discarded for r in storm.found.receipts.values())
        cached += sum(r.cached for r in storm.found.receipts.values())
        reasons |= {r.finish_reason for r in storm.found.receipts.values()}
    assert preempted > 80
    assert discarded > 20
    assert cached > 100
    assert reloaded > 100
    assert reasons == {"stop", "length", "abort", "deadline", "error"}


def test_the_reference_is_what_an_engine_gives_alone(tmp_path: Path) -> None:
    path, digest = write_adapter(tmp_path, "one")
    for number, adapter in enumerate([None, digest]):
        one = ask(f"r{number}", [5, 9, 2], 12, n=2, temperature=1.0, seed=3, adapter=adapter)
        alone = run_alone(one, path if adapter else None)
        assert alone == {c: reference(one, c, 12) for c in range(2)}
