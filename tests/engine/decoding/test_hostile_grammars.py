"""Grammars made to cost: neither the answers of others, nor the loop, nor the memory bear it."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decoding.grammar import checker, compiler, matchers
from engine.decoding.grammar.compiler import Compiled, GrammarCompiler, source_of
from engine.decoding.grammar.lark import checked_lark
from engine.decoding.grammar.matchers import Matchers
from engine.decoding.grammar.schema import checked_schema
from engine.errors import RequestError
from engine.protocol import Grammar
from tests.engine.decoding.test_grammars import BAD, constrained, make
from tests.engine.decoding.test_mask_making import TEXT, VOCAB, said_by
from tests.engine.helpers import Collected, ask, run_until_idle

PROTECTS = ("engine/decoding", "engine/worker/grammar_queue.py")
ROOT = Path(__file__).parents[3]
# Nearly every character leads to another state of the lexer, which all answers share.
MANY_STATES = Grammar("regex", "(.*a.{20}b){30}")


def fill_lexer(compiled: Compiled) -> None:
    """By an answer that draws its tokens."""
    draw = np.random.default_rng(1)
    matcher = compiled.matcher()
    while not matcher.is_error():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0]
        matcher.consume_token(int(draw.choice(allowed)))
    later = compiled.matcher()
    later.compute_bitmask()
    assert later.is_error()  # it would end every later answer


@pytest.mark.parametrize("at_once", [60.0, -1.0])
def test_a_full_lexer_is_replaced(at_once: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers leave in a grammar's lexer neither ends nor changes others, begun or not."""
    monkeypatch.setattr(matchers, "_AT_ONCE_S", at_once)
    one = constrained("x", MANY_STATES.kind, MANY_STATES.text, max_tokens=60)
    alone = make()
    alone.submit(one, "g")
    expected = run_until_idle(alone).tokens["x", 0]
    assert len(expected) == 60
    engine = make()
    engine.submit(replace(one, request_id="begun"), "g")
    found = Collected()
    while len(found.tokens.get(("begun", 0), [])) < 20:
        engine.step()
        found.take(engine)
    fill_lexer(engine._runner.prepare_grammar(MANY_STATES))
    engine.submit(replace(one, request_id="later"), "g")
    run_until_idle(engine, found)
    assert found.tokens["begun", 0] == found.tokens["later", 0] == expected
    assert {each.finish_reason for each in found.receipts.values()} == {"length"}


def test_a_grammar_that_fills_a_lexer_alone_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {"max_lexer_states": 700, "verbose_errors": False}
    monkeypatch.setattr(compiler, "_LIMITS", few)
    engine = make()
    engine.submit(constrained("alone", MANY_STATES.kind, MANY_STATES.text, 400), "g")
    engine.submit(ask("free", [5, 6, 7], 30), "g")
    found = run_until_idle(engine)
    receipt = found.receipts["alone"]
    assert receipt.finish_reason == "error" and "too many states" in receipt.message
    assert len(found.tokens["free", 0]) == 30


def test_slow_masks_are_made_on_the_loops_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all sequences of the grammar, which would hold up the neighbours."""
    now, at_once, fill = [0.0], 0, matchers.fill

    def slow(*given: Any) -> None:
        nonlocal at_once
        at_once += 1
        now[0] += 0.05
        fill(*given)

    monkeypatch.setattr(matchers, "fill", slow)
    monkeypatch.setattr(matchers, "perf_counter", lambda: now[0])
    monkeypatch.setattr(matchers, "thread_time", lambda: now[0])
    engine = make()
    for n in range(4):
        engine.submit(constrained(str(n), "regex", "[a-z]{40}", 40, seed=n), "g")
    found = run_until_idle(engine)
    assert all(receipt.finish_reason == "stop" for receipt in found.receipts.values())
    assert at_once == 1


def test_a_waiting_request_keeps_its_grammar_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come after it: the loop compiles nothing when its turn comes."""
    engine = make(max_running=1)
    engine._runner.grammars._compiler._kept = 2
    engine.submit(ask("running", [5, 6, 7], 10), "g")
    for n in range(6):
        engine.submit(constrained(f"w{n}", "regex", f"[a-d]{{{n + 2}}}", 20), "g")

    def compiled(*_: object) -> None:
        raise AssertionError("a grammar was compiled again")

    monkeypatch.setattr(GrammarCompiler, "compile", compiled)
    found = run_until_idle(engine)
    assert [len(found.receipts[f"w{n}"].message) for n in range(6)] == [0] * 6
    engine.take_outboxes()
    assert len(engine._runner.grammars._compiler._compiled) == 2


def test_a_checked_grammar_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes the interpreter's lock, for which the loop's thread would wait."""

    def read(*_: object) -> None:
        raise AssertionError("the schema was read in the engine's process")

    engine = make()
    for name in ("checked_schema", "checked_lark", "source_of"):
        monkeypatch.setattr(compiler, name, read)
    schema = {"type": "array", "items": {"enum": ["north"]}, "minItems": 1, "maxItems": 1}
    said, _ = said_by(engine, "x", "json_schema", json.dumps(schema))
    assert len(said) > 0


def test_what_is_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    grammars = engine._runner.grammars
    monkeypatch.setattr(grammars, "_checker", None)
    large = Grammar("json_schema", json.dumps({"enum": ["x" * 1_000_000]}))
    assert engine._runner.grammar_ready(large)  # it need not wait for others
    with pytest.raises(RequestError, match="1000014 bytes, at most 262144"):
        engine.submit(constrained("large", large.kind, large.text), "g")
    assert not engine._runner.grammar_ready(Grammar("regex", "a"))


def test_only_the_time_that_a_grammar_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the process that tries grammars waits for a processor: here it is stopped."""
    monkeypatch.setattr(checker, "DEADLINE_S", 0.3)
    grammars = make()._runner.grammars
    grammars.prepare(Grammar("regex", "a"))
    process = grammars._checker._process
    os.kill(process.pid, signal.SIGSTOP)
    goes_on = threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT))
    goes_on.start()
    assert grammars.prepare(Grammar("regex", "ordinary"))
    goes_on.join()
    monkeypatch.setattr(checker, "_WAIT_S", 0.3)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match="takes more than"):
        grammars.prepare(Grammar("regex", "stopped for good"))
    monkeypatch.undo()
    assert grammars.prepare(Grammar("regex", "by another process"))


NO_END: dict[str, dict[str, Any]] = {
    "any property": {
        "type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"},
    },
    "at least one": {
        "type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"},
    },
    "two together": {
        "type": "object", "allOf": [{"properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}],
    },
    "by name": {
        "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/m"}}},
                  "m": {"type": "object", "allOf": [{"$ref": "#/$defs/n"}], "required": ["c"]}},
        "$ref": "#/$defs/m",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NO_END)
def test_objects_without_end_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="no finite value"):
        checked_schema(json.dumps(NO_END[name]))


def test_objects_with_an_end_are_not_refused() -> None:
    tree = {"type": "object", "additionalProperties": {"$ref": "#"}}
    leaf = {"type": "object", "properties": {"v": {"type": "null"}, "c": {"$ref": "#"}}}
    for schema in (
        tree,
        leaf | {"required": ["v"]},
        leaf | {"minProperties": 1},
        tree | {"minProperties": 1, "patternProperties": {"^x": {"type": "null"}}},
        tree | {"type": ["object", "null"], "minProperties": 1},
        {"type": "object", "allOf": [leaf, {"required": ["v"]}]},
    ):
        assert json.loads(checked_schema(json.dumps(schema)))["type"] == schema["type"]


def test_schemas_and_patterns_within_a_grammar_do_not_hide_that_it_never_ends() -> None:
    null = '%json {"type": "null", "x": {"y": "}"}}'
    for without in (
        f"start: {null} start",
        f'start: ("a" | {null}) start',
        'start: %regex {"substring_words": "a b"} start',
        f"start: x\nx: {null} y\ny: x",
    ):
        with pytest.raises(RequestError, match="never ends"):
            checked_lark(without)
    for ending in (
        f"start: {null} start?",
        f"start: {null} start | {null}",
        f"start: (%json {{}} start){{0,3}} {null}",
        'start: start{0} "a"',
    ):
        assert checked_lark(ending).startswith("start: ")


def memory_of_all() -> tuple[int, int, int]:
    """While all of these are tried: how many are refused, by how many KiB this process grows, and the
    most that one of its processes had."""
    engine = make()
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for kind, what, _ in BAD.values():
        try:
            engine.submit(constrained("bad", kind, what), "g")
        except RequestError:
            refused += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return refused, grown, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.proof
def test_memory_is_bounded() -> None:
    """The engine's own grows little while all of these are refused; that of the process which tries
    them has a limit. In a process of its own: what other tests hold counts as their processes', too."""
    code = f"from {__name__} import memory_of_all; print(*memory_of_all())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert run.returncode == 0, run.stderr
    refused, grown, children = map(int, run.stdout.split())
    assert refused == len(BAD)
    assert grown < 200 << 10
    assert 0 < children < 1536 << 10


def test_the_compiler_keeps_what_is_held_and_a_few_more() -> None:
    one = GrammarCompiler(lambda: TEXT, VOCAB, (0,), kept=1)
    grammars = [Grammar("regex", "a" * n) for n in range(1, 5)]
    held = one.compile(grammars[0], source_of(grammars[0]))
    for grammar in grammars[1:]:
        one.compile(grammar)
    assert [one.find(grammar) is not None for grammar in grammars] == [True, False, False, False]
    assert one.find(grammars[0]) is held
    assert isinstance(one.renew(grammars[0], held), Compiled)
    assert one.find(grammars[0]) is not held
    assert one.renew(grammars[0], held) is one.find(grammars[0])  # by then, somebody has
    assert Matchers(one, VOCAB).forced(1) == []
