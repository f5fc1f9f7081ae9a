"""More choices than the batch has places: the others wait, and are as if they had begun with them."""

from typing import Any

import pytest

from tests.engine.helpers import ask, make_config, make_engine, reference, run_until_idle

PROMPT = list(range(1, 12))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        {"max_running": 1},
        {"num_blocks": 12, "max_running": 4},  # choices are preempted
        {"max_batch_tokens": 8},  # the prompt takes several steps
    ],
)
def test_choices_beyond_the_batch_wait_their_turn(settings: Any, overlapped: bool) -> None:
    engine = make_engine(make_config(**{"max_running": 3, **settings}), overlapped=overlapped)
    one = ask("many", PROMPT, max_tokens=5, n=20, temperature=1.0, seed=5)
    other = ask("other", PROMPT[:7], max_tokens=9, namespace="second")
    engine.submit(one, "g")
    engine.submit(other, "g")
    found = run_until_idle(engine)
    said = [found.tokens["many", choice] for choice in range(20)]
    assert said == [reference(one, choice, 5) for choice in range(20)]
    assert found.tokens["other", 0] == reference(other, 0, 9)
    receipt = found.receipts["many"]
    assert (receipt.prompt, receipt.cached + receipt.computed) == (len(PROMPT), len(PROMPT))
    assert (receipt.generated, receipt.delivered, receipt.discarded) == (100, 100, 0)
    assert receipt.finish_reason == "length"


def test_an_abort_ends_the_choices_that_wait() -> None:
    engine = make_engine(make_config(max_running=3))
    engine.submit(ask("many", PROMPT, max_tokens=50, n=20, temperature=1.0, seed=5), "g")
    for _ in range(4):
        engine.step()
    assert engine.abort("many")
    found = run_until_idle(engine)
    receipt = found.receipts["many"]
    assert receipt.finish_reason == "abort" and receipt.computed == len(PROMPT)
    assert set(found.reasons) == {("many", choice) for choice in range(20)}
