"""The benchmark of decoding runs, on few tokens, and compares like with like."""

import json

import pytest

from benchmarks import decoding
from engine.demo.paths import MODEL_DIR
from engine.speculation.costs import StepCosts


def test_it_prints_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert decoding.main(["--quick", "--threads", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["at_least"], line["aim"]) for line in lines] == [
        (1.8, 3.0), (1.2, 1.6), (0.97, 1.0), (0.9, 0.97), (0.9, 0.97), (0.3, 0.05), (3.0, 1.0),
        (99.0, 100.0),
    ]  # fmt: skip
    assert all(line["value"] > 0 for line in lines)
    assert lines[-1]["value"] == 100.0


@pytest.fixture
def steps_of_one_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms and 1 ms a token, so that what is guessed does not depend on how busy the machine is."""
    record, curve = StepCosts.record, StepCosts.curve

    def _record(self: StepCosts, tokens: int, seconds: float) -> None:
        record(self, tokens, 0.010 + 0.001 * tokens)

    monkeypatch.setattr(StepCosts, "record", _record)
    monkeypatch.setattr(StepCosts, "curve", lambda self, token_s: curve(self, 0.001))


@pytest.mark.usefixtures("steps_of_one_cost")
def test_chats_are_drafted_by_the_heads() -> None:
    bench = decoding.Bench(MODEL_DIR, 1, quick=True)
    bench.chat("auto")
    assert bench.counters["drafted_tokens"] > bench.counters["rejected_tokens"]
    bench.chat("off")
    assert bench.counters["drafted_tokens"] == 0


@pytest.mark.usefixtures("steps_of_one_cost")
def test_the_copy_is_guessed_and_noise_is_not() -> None:
    """By look-up alone: heads guess a part of noise too, for what a sequence is likely to say next."""
    bench = decoding.Bench(MODEL_DIR, 1, quick=True, draft_heads="none")
    bench.copy("auto")
    drafted, rejected = (bench.counters[f"{name}_tokens"] for name in ("drafted", "rejected"))
    assert drafted > 2 * rejected > 0
    bench.copy("off")
    assert bench.counters["drafted_tokens"] == 0
    generated = bench.counters["generated_tokens"]
    bench.noise("auto")
    assert bench.counters["drafted_tokens"] < bench.counters["generated_tokens"] / 4
    assert generated > 100


def test_a_sequence_without_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure falls where the scheduler leaves a ready sequence out."""
    add = decoding.Engine.__init__

    def forgetful(self: decoding.Engine, *given: object, **named: object) -> None:
        add(self, *given, **named)  # type: ignore[arg-type]
        complete = self.scheduler._complete
        turn = [0]

        def sometimes(seq: object) -> bool:
            turn[0] += 1
            return turn[0] % 50 == 0 or complete(seq)  # type: ignore[arg-type]

        self.scheduler._complete = sometimes  # type: ignore[method-assign, assignment]

    monkeypatch.setattr(decoding.Engine, "__init__", forgetful)
    assert decoding.full_steps() < 90
