"""Masks are the same wherever they are made, and what a grammar forces is guessed."""

import json
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLExecutor
from tokenizers import Tokenizer

from engine.decoding.grammar import matchers
from engine.decoding.grammar.beside import Beside, Job
from engine.decoding.grammar.compiler import GrammarCompiler
from engine.decoding.grammar.matchers import Matchers, fill
from engine.decoding.masks import exclude_, mask_of
from engine.demo.paths import MODEL_DIR
from engine.loop import Engine
from engine.protocol import Grammar
from tests.engine.decoding.test_grammars import SCHEMAS, answer, constrained, make
from tests.engine.helpers import ask, run_until_idle

TEXT = (MODEL_DIR / "tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TEXT)
VOCAB = 2048
RECORD = {
    "type": "object",
    "properties": {"description": {"type": "string", "maxLength": 5}, "quantity": {"enum": [7]}},
    "required": ["description", "quantity"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: TEXT, VOCAB, (0,))


def said_by(engine: Engine, name: str, kind: str, what: Any, **changes: Any) -> tuple[Any, Any]:
    engine.submit(constrained(name, kind, what, **changes), "g")
    found = run_until_idle(engine)
    engine.receipts.acknowledge([name], "g")
    return found.tokens[name, 0], found.receipts[name]


@pytest.mark.parametrize("taken", range(6))
def test_masks_made_at_once_are_those_of_the_threads(taken: int, compiler: GrammarCompiler) -> None:
    said = TOKENIZER.encode('{"description": "an oar", "quantity"').ids
    executor, words = LLExecutor(num_threads=1), VOCAB // 32
    for guesses in ([], said[taken : taken + 2], [said[taken], 5, 6]):
        masks = np.full((2, 4, words), -1, np.int32)
        compiled = compiler.compile(Grammar("json_schema", json.dumps(RECORD)))
        one, other = compiled.matcher(), compiled.matcher()
        for matcher in (one, other):
            assert matcher.try_consume_tokens(said[:taken]) == taken
        fill(one, guesses, masks[0].ctypes.data, 4 * words)
        where = masks[1].ctypes.data, 4 * words, 4
        if guesses:
            executor.unsafe_compute_mask_ptr_with_draft_token([(other, 0, guesses)], *where)
        else:
            executor.unsafe_compute_mask_ptr([(other, 0)], *where)
        assert (masks[0] == masks[1]).all()
        assert one.compute_bitmask() == other.compute_bitmask()  # no guess is taken


def test_answers_are_the_same_wherever_masks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    threads = Matchers._fill

    def counted(self: Matchers, plain: Any, guessed: Any, masks: Any) -> None:
        made.append(len(plain) + sum(1 + len(each[2]) for each in guessed))
        threads(self, plain, guessed, masks)

    def broken(*_: Any) -> None:
        raise ValueError("out of memory")

    monkeypatch.setattr(Matchers, "_fill", counted)
    answers = []
    monkeypatch.setattr(matchers, "_SEVERAL", 60)
    for name, value in (
        ("_AT_ONCE_S", 60.0),
        ("_AT_ONCE_S", -1.0),
        ("_QUICK_S", 0.0),
        ("fill", broken),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(matchers, "_QUICK_S", 60.0)
            patch.setattr(matchers, "_SLOW_S", 60.0)
            patch.setattr(matchers, name, value)
            engine = make()
            for n, schema in enumerate(SCHEMAS[:6]):
                engine.submit(constrained(str(n), "json_schema", schema, 30), "g")
            found = run_until_idle(engine)
            answers.append({n: found.tokens[str(n), 0] for n in range(6)})
            made.append(0)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    at_once, in_threads = (sum(part) for part in _parts(made)[:2])
    assert at_once == 6 < in_threads / 4  # the first of each sequence alone


class InTime(Beside):
    """A thread that is done before the model."""

    def submit(self, work: Callable[[], None]) -> Job:
        job = super().submit(work)
        job.wait(None)
        return job


class Busy(Beside):
    """A thread that never begins."""

    def submit(self, work: Callable[[], None]) -> Job:
        return Job(work)


class Late(Beside):
    """A thread that has begun and is not done in time: `late` sleeps in it."""

    def submit(self, work: Callable[[], None]) -> Job:
        begun = threading.Event()
        job = super().submit(lambda: (begun.set(), work())[1])
        begun.wait()
        return job


def test_the_thread_beside_the_model_makes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is in time, never begins, or is late: then it rests, and no answer changes."""
    slept = False

    def late(*given: Any) -> None:
        nonlocal slept
        if not slept and threading.current_thread().name == "late":
            slept = True
            time.sleep(0.05)
        fill(*given)

    monkeypatch.setattr(matchers, "fill", late)
    monkeypatch.setattr(matchers, "_SEVERAL", 1)
    for limit in ("_AT_ONCE_S", "_BESIDE_S", "_QUICK_S", "_SLOW_S"):
        monkeypatch.setattr(matchers, limit, 60.0)
    answers, jobs, rests = [], [], []
    for pool in (None, InTime("in-time"), Busy("busy"), Late("late")):
        engine = make(speculation="off")
        engine._runner._patience_s = 0.001 if isinstance(pool, Late) else None
        served = engine._runner.grammars.matchers
        served._beside, make_all, made = pool, served._make_all, 0

        def counted(*given: Any, make_all: Any = make_all) -> None:
            nonlocal made
            made += threading.current_thread() is not threading.main_thread()
            make_all(*given)

        monkeypatch.setattr(served, "_make_all", counted)
        for n in range(6):
            engine.submit(constrained(str(n), "json_schema", SCHEMAS[n], 30), "g")
        found = run_until_idle(engine)
        answers.append({n: found.tokens[str(n), 0] for n in range(6)})
        jobs.append(made)
        rests.append(served._alone > 0)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert jobs[0] == jobs[2] == 0 and jobs[1] > 3 and slept
    assert rests == [False, False, True, True]


def test_what_keeps_the_thread_from_following_a_grammar_is_raised() -> None:
    """In the loop's thread, which ends the step's requests; the engine goes on."""
    engine = make(speculation="off")
    served = engine._runner.grammars.matchers
    served._beside, state_of = InTime("in-time"), served._state_of

    def broken(row: Any) -> Any:
        raise MemoryError("no room for a grammar")

    served._state_of = broken
    for n in range(6):
        engine.submit(constrained(str(n), "json_schema", SCHEMAS[n], 30), "g")
    found = run_until_idle(engine)
    messages = {receipt.message for receipt in found.receipts.values()}
    assert messages == {"MemoryError: no room for a grammar"}
    served._state_of = state_of
    _, receipt = said_by(engine, "then", "json_schema", RECORD, max_tokens=60)
    assert receipt.finish_reason == "stop"


def _parts(made: list[int]) -> list[list[int]]:
    ends = [n for n, count in enumerate(made) if not count]
    return [made[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forces_is_guessed(temperature: float) -> None:
    """In fewer steps, with the same answer and exact counts."""
    found = {}
    for setting in ("off", "auto"):
        ticks = count()
        engine = make(speculation=setting, draft_heads="none")
        engine._clock = lambda ticks=ticks: next(ticks) / 1000  # every step takes as long
        engine._runner._patience_s = None  # a busy machine makes no mask late
        changes = {"temperature": temperature, "max_tokens": 60}
        for name in ("first", "then"):  # the first measures what steps take
            tokens, receipt = said_by(engine, name, "json_schema", RECORD, **changes)
        found[setting] = tokens, engine.metrics.counters["steps"]
        assert json.loads(TOKENIZER.decode(tokens))["quantity"] == 7
        assert receipt.generated == receipt.delivered == len(tokens)
        assert receipt.rejected == 0
    assert found["auto"][0] == found["off"][0]
    assert found["auto"][1] < 0.8 * found["off"][1]


def test_guesses_of_a_late_row_are_neither_right_nor_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are verified when the row's masks are there."""
    expected, _ = said_by(make(speculation="off"), "x", "json_schema", RECORD, max_tokens=60)
    engine, fills, threads = make(speculation="auto", draft_heads="none"), count(), Matchers._fill
    ticks = count()
    engine._clock = lambda: next(ticks) / 1000
    said_by(engine, "first", "json_schema", RECORD, max_tokens=60)
    monkeypatch.setattr(matchers, "_AT_ONCE_S", -1.0)  # every mask is left to the threads

    def late(self: Matchers, *given: Any) -> None:
        if next(fills) % 2 == 0:
            time.sleep(0.06)
        threads(self, *given)

    monkeypatch.setattr(Matchers, "_fill", late)
    engine._runner._patience_s = 0.0
    before = engine.metrics.counters["drafted_tokens"]
    tokens, receipt = said_by(engine, "x", "json_schema", RECORD, max_tokens=60)
    assert tokens == expected
    assert receipt.recomputed > 0  # rows were late
    assert receipt.rejected == engine.metrics.counters["rejected_tokens"] == 0
    assert engine.metrics.counters["drafted_tokens"] > before


def test_a_grammar_that_forces_too_much_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matchers, "_SLOW_S", 60.0)  # however busy the machine is
    engine = make(speculation="auto", draft_heads="none")
    long = {"const": "so " * 600}
    tokens, _ = said_by(engine, "long", "json_schema", long, max_tokens=40)
    assert len(tokens) == 40
    assert [grammar.text for grammar in engine._runner.grammars.matchers._long] == [
        json.dumps(long)
    ]
    short, _ = said_by(engine, "short", "choice", ["a long answer that is forced"])
    assert TOKENIZER.decode(short).strip().startswith("a long answer")
    assert engine.metrics.counters["drafted_tokens"] > 0


@pytest.mark.parametrize("by_torch", [False, True])
def test_excluded_ids_are_those_of_the_mask(
    by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torch:
        monkeypatch.setattr("engine.decoding.masks.has_kernel", lambda: False)
    worst = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0]]).repeat(2, 10)
    exclude_(worst, [1], np.stack([mask_of([1, 3], 40)]))
    assert worst[0, 3] == worst[1, 3] == 1 and worst[1, 2] == float("-inf")
    assert worst[1, [0, 4, 5]].isnan().all() and worst[1, 7] == float("-inf")
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 75, generator=draw)
    allowed = [[0, 3, 31, 32, 74], list(range(75)), [7]]
    for index in ([0, 2, 4], [4, 0, 1]):
        changed = logits.clone()
        exclude_(changed, index, np.stack([mask_of(ids, 75) for ids in allowed]))
        expected = logits.clone()
        for row, ids in zip(index, allowed, strict=True):
            out = sorted({*range(75)} - set(ids))
            expected[row, out] = float("-inf")
        assert torch.equal(changed, expected)
    all_rows = logits[:3].clone()
    exclude_(all_rows, [0, 1, 2], np.stack([mask_of(ids, 75) for ids in allowed]))
    assert [torch.isfinite(row).nonzero()[:, 0].tolist() for row in all_rows] == allowed


def test_constrained_and_free_rows_share_a_batch() -> None:
    engine = make()
    engine.submit(ask("free", [5, 6, 7], 20), "g")
    alone = run_until_idle(engine).tokens["free", 0]
    engine.receipts.acknowledge(["free"], "g")
    engine.submit(ask("free", [5, 6, 7], 20), "g")
    engine.submit(constrained("ruled", "json_schema", RECORD), "g")
    found = run_until_idle(engine)
    assert found.tokens["free", 0] == alone
    assert set(json.loads(answer(found, "ruled"))) == {"description", "quantity"}
