"""In a large batch, speculation that cannot help is considered seldom; alone, in every step."""

import random

import pytest

from engine.speculation import speculation
from engine.speculation.lookup import PromptLookup
from tests.engine.helpers import Clock, ask, make_config, make_engine


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
