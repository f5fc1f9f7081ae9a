"""Each way in which a count can go wrong is found when the receipt is written, by a second count
that is kept apart from the first."""

from collections.abc import Callable

import pytest

from engine.batch import Row
from engine.errors import IntegrityError
from engine.loop import Engine
from engine.outputs.results import OutputProcessor
from engine.scheduling.sequence import Sequence
from tests.engine.helpers import ask, make_config, make_engine, run_until_idle

count = OutputProcessor._account
take = OutputProcessor._count_generated


def counted_twice(self: OutputProcessor, seq: Sequence, row: Row, end: int) -> None:
    before = seq.counted_until
    count(self, seq, row, end)
    if before < seq.prompt_len:
        seq.counted_until = before
        count(self, seq, row, end)


def not_counted(self: OutputProcessor, seq: Sequence, row: Row, end: int) -> None:
    if row.start != 8:
        count(self, seq, row, end)


def counted_as_cached(self: OutputProcessor, seq: Sequence, row: Row, end: int) -> None:
    count(self, seq, row, end)
    seq.request.cached = (seq.request.cached or 0) + (row.start == 0)


def generated_twice(self: OutputProcessor, seq: Sequence, tokens: list[int], now: float) -> None:
    take(self, seq, tokens, now)
    seq.request.generated += seq.output_len == 2


def kept_twice(self: OutputProcessor, seq: Sequence, tokens: list[int], now: float) -> None:
    if seq.output_len == 2:
        seq.history.append(tokens[0])
    take(self, seq, tokens, now)


def delivered_twice(self: OutputProcessor, seq: Sequence, tokens: list[int], now: float) -> None:
    take(self, seq, tokens, now)
    seq.request.delivered += seq.output_len == 1


def run(engine: Engine) -> None:
    for number in range(3):
        engine.submit(ask(f"r{number}", list(range(1, 21)), 6, n=1 + number % 2), "g")
    run_until_idle(engine)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("_account", counted_twice),
        ("_account", not_counted),
        ("_account", counted_as_cached),
        ("_count_generated", generated_twice),
        ("_count_generated", kept_twice),
        ("_count_generated", delivered_twice),
    ],
)
def test_a_wrong_count_stops_the_engine(
    method: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(max_batch_tokens=8)
    run(make_engine(config))
    engine = make_engine(config)
    monkeypatch.setattr(OutputProcessor, method, fault)
    with pytest.raises(IntegrityError, match="does not add up"):
        run(engine)
    engine.abandon("the counts disagree")
    found = [receipt for outbox in engine.take_outboxes().values() for receipt in outbox.receipts]
    assert len({receipt.request_id for receipt in found}) == len(found) > 0
    assert not engine.requests
    assert all(receipt.cached + receipt.computed == receipt.prompt for receipt in found)
