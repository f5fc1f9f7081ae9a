"""In a large batch, speculation that cannot help is considered seldom; alone, in every step."""

import random

import pytest

from engine.batch import StepBatch
from engine.loop import Engine
from engine.protocol import Grammar
from engine.runners.fake import FakeRunner
from engine.scheduling import speculation
from engine.speculation.costs import StepCosts, seconds_of
from engine.speculation.lookup import PromptLookup
from tests.engine.helpers import Clock, ask, make_config, make_engine, run_until_idle


class Idle:
    """A draft model that is never worth its time."""

    step_s = 1.0

    def guesses(self, histories: dict[int, list[int]], count: int) -> dict[int, list[int]]:
        raise AssertionError("nobody asked for guesses")

    def forget(self, number: int) -> None:
        pass


@pytest.mark.parametrize(("requests", "shares"), [(1, (1.0, 1.0)), (32, (0.2, 0.2))])
def test_a_crowd_is_looked_up_in_turns(
    requests: int, shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, considered, offers = 0, 0, PromptLookup.read

    def read(self: PromptLookup, history: list[int], most: int) -> int:
        nonlocal looked_up
        looked_up += 1
        return offers(self, history, most)

    def worthless(*_: object) -> tuple[int, int]:
        nonlocal considered
        considered += 1
        return 0, 0

    monkeypatch.setattr(PromptLookup, "read", read)
    monkeypatch.setattr(speculation, "best_drafts", worthless)
    clock, draw = Clock(), random.Random(5)
    engine = make_engine(make_config(max_running=64, num_blocks=1024), clock)
    engine.scheduler.speculation._drafter = Idle()
    for n in range(requests):
        prompt = [draw.randrange(1, 1000) for _ in range(20)]
        engine.submit(ask(f"r{n}", prompt, 80), "g")
    while engine.busy:
        clock.now += 0.01
        engine.step()
        engine.take_outboxes()
    decoded = 79
    assert 0.5 * shares[0] < looked_up / (decoded * requests) <= 1.05 * shares[0]
    assert 0.5 * shares[1] < considered / decoded <= 1.05 * shares[1]
    assert engine.metrics.counters["generated_tokens"] == 80 * requests


class Ruled(FakeRunner):
    """Its grammars force every token at whose position `every` divides."""

    said: dict[str, list[int]]
    every: int
    engine: Engine

    def prepare_grammar(self, grammar: Grammar) -> object:
        return object()

    def forced(self, seq: int) -> list[int]:
        found = next(s for s in self.engine.scheduler.running if s.number == seq)
        if found.output_len % self.every:
            return []
        answer = self.said[found.request.inputs.request_id]
        return answer[found.output_len : found.output_len + 1]


@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize(("every", "least", "most"), [(10, 0.0, 0.03), (1, 0.38, 0.5)])
def test_what_grammars_force_is_guessed_where_the_tokens_of_that_step_are_worth_it(
    every: int, least: float, most: float, faster: bool
) -> None:
    """A few guesses in a step of 32 rows take longer than they save, and what a step without any
    takes is measured again when the machine has become faster."""
    config, clock, draw = make_config(max_running=64, num_blocks=2048), Clock(), random.Random(5)
    prompts = {f"r{n}": [draw.randrange(1, 1000) for _ in range(20)] for n in range(32)}
    steps, slow = 0, 2.0 if faster else 1.0

    def pause(batch: StepBatch) -> None:
        nonlocal steps
        decodes = all(row.start >= row.prompt_len for row in batch.rows)
        steps += decodes and hasattr(runner, "said")
        tokens = sum(len(row.tokens) for row in batch.rows)
        spent = 0.008 + (0.0006 if decodes else 0.0003) * tokens
        clock.now += spent * (slow if steps < 6 else 1.0)

    runner = Ruled(config, pause=pause)
    engine = runner.engine = Engine(config, runner, clock=clock)
    asked = {name: ask(name, prompt, 96) for name, prompt in prompts.items()}
    for request in asked.values():
        engine.submit(request, "g")
    found = run_until_idle(engine)
    runner.said, runner.every = {name: found.tokens[name, 0] for name in prompts}, every
    engine.receipts.acknowledge(list(prompts), "g")
    before = engine.metrics.counters["drafted_tokens"]
    for name, prompt in prompts.items():
        engine.submit(ask(name, prompt, 96, grammar=Grammar("regex", "x")), "g")
    answers = run_until_idle(engine).tokens
    drafted = engine.metrics.counters["drafted_tokens"] - before
    assert {name: answers[name, 0] for name in prompts} == runner.said
    assert least <= drafted / (32 * 95) <= most


@pytest.mark.parametrize("seed", range(60))
def test_as_many_certain_guesses_as_give_most_tokens_a_second(seed: int) -> None:
    """As if each number of them were tried."""
    draw = random.Random(seed)
    one = speculation.Speculation(make_config())
    for _ in range(draw.randrange(1, 30)):
        tokens = draw.choice([1, 2, 3, 5, 8, 13, 20, 32, 33, 40, 60, 64, 70, 100, 300])
        slope = draw.choice([1e-5, 3e-5, 1e-4])
        one._costs.record(tokens, 0.001 * draw.random() + tokens * slope)
    rows, most = draw.randrange(1, 40), draw.randrange(300)
    token_s = draw.choice([None, 1e-5, 1e-4])
    curve = one._costs.curve(token_s)
    rates = [(rows + n) / seconds_of(curve, rows + n) for n in range(most + 1)]
    chosen = one._best_certain(most, rows, token_s)
    best = max(rates)
    assert rates[chosen] == pytest.approx(best if best > 1.05 * rates[0] else rates[0], rel=1e-9)
    assert chosen == 0 or rates[chosen] > 1.05 * rates[0]


def test_a_crowd_with_grammars_reckons_seldom_while_no_guess_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a step costs by the token, whatever the grammars force."""
    reckoned, steps, curve = 0, 0, StepCosts.curve

    def counted(self: StepCosts, token_s: float | None) -> list[tuple[float, float]]:
        nonlocal reckoned
        reckoned += 1
        return curve(self, token_s)

    def pause(batch: StepBatch) -> None:
        nonlocal steps
        steps += 1
        clock.now += 0.001 * sum(len(row.tokens) for row in batch.rows)

    monkeypatch.setattr(StepCosts, "curve", counted)
    config, clock, draw = make_config(max_running=64, num_blocks=2048), Clock(), random.Random(5)
    runner = Ruled(config, pause=pause)
    runner.said, runner.every = {}, 1000
    engine = runner.engine = Engine(config, runner, clock=clock)
    for n in range(32):
        prompt = [draw.randrange(1, 1000) for _ in range(20)]
        engine.submit(ask(f"r{n}", prompt, 96, grammar=Grammar("regex", "x")), "g")
    run_until_idle(engine)
    assert engine.metrics.counters["drafted_tokens"] == 0
    assert 0 < reckoned < steps / 4
