"""A waiting request of a high priority never waits for a lower one that holds what it lacks."""

from pathlib import Path

import pytest

from engine.loop import Engine
from tests.engine.helpers import Collected, ask, make_config, make_engine, write_adapter


def steps_until_first_token(engine: Engine, name: str, most: int = 200) -> tuple[int, Collected]:
    found = Collected()
    for step in range(most):
        engine.step()
        found.take(engine)
        if found.tokens.get((name, 0)):
            return step + 1, found
    raise AssertionError(f"{name} had no token after {most} steps")


@pytest.mark.parametrize("overlapped", [False, True])
def test_lower_priorities_give_up_the_blocks_of_an_adapter(
    tmp_path: Path, overlapped: bool
) -> None:
    path, digest = write_adapter(tmp_path, "wide", rank=40)  # 10 blocks
    engine = make_engine(make_config(num_blocks=24), overlapped=overlapped)
    engine.load_adapter(path)
    for number in range(2):  # 8 to 11 blocks each, of 24
        engine.submit(ask(f"low{number}", [number + 1] * 30, 14), "g")
    engine.step()
    engine.submit(ask("high", [9] * 8, 4, adapter=digest, priority=9), "g")
    _, found = steps_until_first_token(engine, "high", 6)
    assert not found.receipts
    assert engine.metrics.counters["preemptions"]


def test_lower_priorities_give_up_the_slot_of_their_adapter(tmp_path: Path) -> None:
    one, low = write_adapter(tmp_path, "one")
    two, high = write_adapter(tmp_path, "two")
    engine = make_engine(make_config(num_blocks=64, max_adapter_slots=1, adapter_drain_s=1e9))
    for path in (one, two):
        engine.load_adapter(path)
    for number in range(2):
        engine.submit(ask(f"low{number}", [number + 1] * 8, 40, adapter=low), "g")
    engine.submit(ask("base", [5] * 8, 40), "g")
    engine.step()
    engine.submit(ask("high", [9] * 8, 4, adapter=high, priority=9), "g")
    _, found = steps_until_first_token(engine, "high", 6)
    assert not found.receipts
    # Only the sequences of the adapter that left were preempted.
    assert engine.metrics.counters["preemptions"] == 2


def test_equal_priorities_keep_their_slot(tmp_path: Path) -> None:
    one, low = write_adapter(tmp_path, "one")
    two, high = write_adapter(tmp_path, "two")
    engine = make_engine(make_config(num_blocks=64, max_adapter_slots=1, adapter_drain_s=1e9))
    for path in (one, two):
        engine.load_adapter(path)
    engine.submit(ask("same", [1] * 8, 40, adapter=low, priority=9), "g")
    engine.submit(ask("lower", [2] * 8, 40, adapter=low), "g")
    engine.step()
    engine.submit(ask("high", [9] * 8, 4, adapter=high, priority=9), "g")
    for _ in range(10):
        engine.step()
    assert not engine.metrics.counters["preemptions"]


def test_cached_blocks_of_the_prompt_are_not_counted_as_free() -> None:
    """They are idle until the request holds them, and cannot be both its prefix and its new room."""
    engine = make_engine(make_config(num_blocks=16, max_running=4))
    prompt = [7] * 28
    engine.submit(ask("first", prompt, 1, priority=9), "g")
    while engine.busy:
        engine.step()
        engine.take_outboxes()
    engine.submit(ask("low", [1] * 28, 30), "g")  # 8 blocks beside 7 that are cached, and growing
    engine.step()
    engine.submit(ask("high", [*prompt, *[8] * 4], 8, priority=9), "g")
    _, found = steps_until_first_token(engine, "high", 3)
    assert not found.receipts
