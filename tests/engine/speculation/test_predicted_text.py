"""A predicted text is guessed from: it saves time where the answer repeats it, and changes nothing."""

import random

import pytest

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.loop import Engine
from engine.runners.fake import FakeRunner
from tests.engine.helpers import Clock, ask, make_config, make_engine, run_until_idle

_STEP_S, _TOKEN_S = 0.03, 0.002
PROMPT = [1, 2, 3]
ANSWER = random.Random(7).sample(range(100, 900), 120)  # nothing in it is said twice


class Saying(FakeRunner):
    """Says ANSWER, in simulated time."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        super().__init__(config, context_length=2000)
        self._clock = clock

    def launch(self, batch: StepBatch) -> list:
        tokens = sum(len(row.tokens) for row in batch.rows)
        self._clock.now += max(_STEP_S, tokens * _TOKEN_S)
        return super().launch(batch)

    def _token_after(self, flat, row) -> int:  # type: ignore[no-untyped-def]
        return ANSWER[(len(flat) - len(PROMPT)) % len(ANSWER)]


def run(prediction: list[int]) -> tuple[Engine, list[int], float]:
    config, clock = make_config(num_blocks=400, max_batch_tokens=512), Clock()
    engine = Engine(config, Saying(config, clock), clock=clock)
    # Another request teaches the engine what a step takes.
    for name, text in (("first", []), ("asked", prediction)):
        began = clock.now
        engine.submit(ask(name, PROMPT, max_tokens=100, prediction=text), "g")
        found = run_until_idle(engine)
    receipt = found.receipts["asked"]
    assert receipt.prompt == len(PROMPT) and receipt.generated == 100
    counters = engine.metrics.counters
    assert receipt.accepted + receipt.rejected == counters["drafted_tokens"]
    return engine, found.tokens["asked", 0], clock.now - began


def test_an_answer_that_was_predicted_takes_a_third_of_the_time() -> None:
    _, plain, without = run([])
    engine, said, seconds = run(ANSWER)
    assert said == plain == ANSWER[:100]
    assert seconds < without / 3
    assert engine.metrics.counters["rejected_tokens"] < 20


def test_an_edit_in_the_middle_costs_a_few_guesses() -> None:
    edited = [*ANSWER[:40], *range(900, 905), *ANSWER[43:]]
    _, said, seconds = run(edited)
    assert said == ANSWER[:100]
    assert seconds < run([])[2] / 2


def test_a_wrong_prediction_costs_no_time() -> None:
    wrong = [token + 1 for token in ANSWER]
    _, said, seconds = run(wrong)
    assert said == ANSWER[:100]
    assert seconds < 1.1 * run([])[2]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_predictions_change_no_answer(n: int, overlapped: bool) -> None:
    dice, said = random.Random(3), {}
    for name, prediction in (("without", []), ("with", [dice.randrange(1, 9) for _ in range(50)])):
        engine = make_engine(make_config(num_blocks=256), overlapped=overlapped)
        engine.submit(
            ask("r", PROMPT, max_tokens=60, n=n, temperature=1.0, seed=2, prediction=prediction),
            "g",
        )
        said[name] = run_until_idle(engine).tokens
    assert said["with"] == said["without"]


@pytest.mark.parametrize("prediction", [[1, 1000], [-1], [1] * 5000])
def test_a_prediction_of_other_ids_is_refused(prediction: list[int]) -> None:
    with pytest.raises(RequestError, match="prediction has"):
        make_engine().submit(ask("bad", PROMPT, prediction=prediction), "g")
