"""What prompt look-up guesses, and when a step takes guesses: checked against a search written here,
and in simulated time."""

import random
import sys

import pytest

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.runners.fake import FakeRunner
from engine.scheduling import speculation
from engine.speculation.costs import StepCosts, seconds_of
from engine.speculation.lookup import PromptLookup
from tests.engine.helpers import Clock, ask, make_config


def read(history: list[int], prompt_len: int | None = None) -> PromptLookup:
    lookup = PromptLookup(0, len(history) if prompt_len is None else prompt_len)
    while lookup.read(history, 7):
        pass
    return lookup


def test_the_guesses_follow_an_earlier_occurrence() -> None:
    dice = random.Random(1)
    guessed = 0
    for _ in range(300):
        history = [dice.randrange(6) for _ in range(dice.randrange(4, 60))]
        ids, chances = read(history).guesses(history, 0, 5, 0.0)
        pair = history[-2:]
        places = [n for n in range(2, len(history)) if history[n - 2 : n] == pair]
        if not places:
            continue
        guessed += 1
        follows = [[*history, *history][n : n + min(5, len(history) - n)] for n in places]
        assert any(ids[: len(f)] == f for f in follows)
        assert len(ids) == len(chances) == 5
        assert chances == sorted(chances, reverse=True)
    assert guessed > 100


def test_a_period_goes_on() -> None:
    history = [9, *[1, 2, 3] * 4]
    assert read(history).guesses(history, 0, 7, 0.0)[0] == [1, 2, 3, 1, 2, 3, 1]
    assert read(history).guesses(history, 1, 3, 0.0)[0] == [2, 3, 1]


def test_a_replaced_id_does_not_end_a_copy() -> None:
    text = list(range(100, 140))
    history = [*text, 1, 2, *text[:20], 7, *text[21:22]]
    ids, _ = read(history).guesses(history, 0, 4, 0.0)
    assert ids == text[22:26]


def test_the_shares_follow_what_the_answer_does() -> None:
    text = [random.Random(3).randrange(500) for _ in range(60)]
    copied = [*text, 1, *text[:40]]
    chance = read(copied, 61).guesses(copied, 0, 4, 0.0)[1][3]
    noise = random.Random(4)
    other = list(text)
    for n in range(0, 50, 2):
        other += [*text[n : n + 2], noise.randrange(500, 900)]
    other += text[4:6]
    low = read(other, 60).guesses(other, 0, 4, 0.0)[1][0]
    assert chance > 0.6
    assert low < 0.1


class Timed(FakeRunner):
    """Says its prompt again; a step takes what `seconds` says for its tokens."""

    def __init__(self, config: EngineConfig, clock: Clock, fixed: float, token: float) -> None:
        super().__init__(config, context_length=2000)
        self._clock, self._fixed, self._token = clock, fixed, token

    def launch(self, batch: StepBatch) -> list:
        tokens = sum(len(row.tokens) for row in batch.rows)
        self._clock.now += max(self._fixed, tokens * self._token)
        return super().launch(batch)

    def _token_after(self, flat, row) -> int:  # type: ignore[no-untyped-def]
        if row.prompt_len % 2:
            return super()._token_after(flat, row)
        return 100 + (len(flat) * 7) % 80


def run(requests: int, fixed: float, token: float, length: int, setting: str) -> Engine:
    config = make_config(num_blocks=4000, max_batch_tokens=512, max_running=32, speculation=setting)
    clock = Clock()
    engine = Engine(config, Timed(config, clock, fixed, token), clock=clock)
    for n in range(requests):
        prompt = [100 + (at * 7) % 80 for at in range(length)]
        engine.submit(ask(f"r{n}", prompt, max_tokens=150), "g")
    while engine.busy:
        engine.step()
        engine.take_outboxes()
    return engine


def seconds(engine: Engine) -> float:
    return engine._clock.now - 1000.0


def test_a_lone_copy_is_several_times_as_fast() -> None:
    ours = run(1, 0.03, 0.002, 200, "auto")
    assert seconds(run(1, 0.03, 0.002, 200, "off")) > 4 * seconds(ours)
    assert ours.metrics.counters["rejected_tokens"] < 20


def test_guesses_stop_where_every_token_costs_the_same() -> None:
    """32 sequences fill the device: one more token in a step takes as long as a step of one."""
    ours = run(32, 0.03, 0.002, 200, "auto")
    plain = run(32, 0.03, 0.002, 200, "off")
    assert seconds(ours) <= 1.03 * seconds(plain)
    few = run(4, 0.03, 0.002, 200, "auto")
    assert few.metrics.counters["drafted_tokens"] > 300


def test_guesses_that_prove_wrong_stop() -> None:
    ours = run(1, 0.03, 0.002, 201, "auto")  # an odd prompt: the answer is noise
    assert seconds(ours) <= 1.02 * seconds(run(1, 0.03, 0.002, 201, "off"))


def test_off_guesses_nothing() -> None:
    assert run(1, 0.03, 0.002, 200, "off").metrics.counters["drafted_tokens"] == 0
    with pytest.raises(ConfigError, match="speculation is 'on': use one of auto, off"):
        make_config(speculation="on")


def test_the_first_measurements_of_a_size_are_doubted() -> None:
    """They may contain work that is done once: a size is tried again soon, until three are known."""
    costs = StepCosts()
    for number in range(5):
        costs.record(4, 0.9 if number == 0 else 0.012)
        for _ in range(17):
            costs.record(1, 0.010)
        assert costs.measured(1) and costs.measured(4) == (number >= 2)
    assert seconds_of(costs.curve(None), 4) < 0.02


def test_costs_interpolate_between_what_was_measured() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.record(1, 0.03)
        costs.record(12, 0.04)
    curve = costs.curve(0.002)
    assert seconds_of(curve, 1) == pytest.approx(0.03)
    assert 0.03 < seconds_of(curve, 6) < 0.04
    assert seconds_of(curve, 22) == pytest.approx(0.06)
    assert costs.measured(1)
    assert not costs.measured(40)
    for _ in range(300):
        costs.record(12, 0.04)
    assert not costs.measured(1), "it is measured again"


def test_a_step_reads_a_bounded_part_of_a_long_prompt() -> None:
    config = make_config(num_blocks=20_000, max_batch_tokens=60_000, step_s=0.0)
    engine = Engine(config, FakeRunner(config, context_length=60_000), clock=Clock())
    engine.submit(ask("r", [n * n % 997 for n in range(50_000)], max_tokens=40), "g")
    engine.step()
    seq = engine.scheduler.running[0]
    read_before = 50_000 - 16 * 1024
    for _ in range(30):
        engine.step()
        lookup = engine.scheduler.speculation._lookups.get(seq.number)
        if lookup is not None:
            assert lookup._read - read_before <= speculation._READ
            read_before = lookup._read
    assert read_before == len(seq.history) - 1
    assert sys.getsizeof(lookup._latest) < 2 << 20
