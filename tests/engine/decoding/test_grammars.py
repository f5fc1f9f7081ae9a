"""Answers under a grammar: valid by independent validators, whatever the model prefers."""

import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.decoding.grammar import matchers
from engine.decoding.grammar.compiler import source_of
from engine.decoding.grammar.matchers import Matchers
from engine.decoding.grammar.schema import checked_schema
from engine.demo.paths import MODEL_DIR
from engine.errors import RequestError
from engine.loop import Engine
from engine.protocol import Grammar
from engine.runners.cpu.runner import load_runner
from tests.engine.helpers import Collected, ask, run_until_idle

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def make(**settings: Any) -> Engine:
    """In float32: in bfloat16, which some CPUs choose, an answer depends on its batch."""
    fields = {"num_blocks": 256, "max_batch_tokens": 256, "threads": 1, "dtype": "float32"}
    config = EngineConfig(model=str(MODEL_DIR), **(fields | settings))
    return Engine(config, load_runner(config))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make()


def constrained(name: str, kind: str, what: Any, max_tokens: int = 120, **changes: Any) -> Any:
    text = what if isinstance(what, str) else json.dumps(what)
    prompt = TOKENIZER.encode(f"{name}: write an answer about tolls").ids
    changes = {"temperature": 1.0, "seed": 3, "ignore_eos": False} | changes
    return ask(name, prompt, max_tokens, grammar=Grammar(kind, text), **changes)


def answer(found: Collected, name: str, choice: int = 0) -> str:
    eos = set(range(1))
    ids = [token for token in found.tokens[name, choice] if token not in eos]
    return str(TOKENIZER.decode(ids))


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "maximum": 40},
        "minItems": 2,
        "maxItems": 4,
    },
    {"enum": ["red", "green", 7, None, {"a": [1]}]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {
        "anyOf": [
            {"type": "boolean"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        ]
    },
    {
        "type": "object",
        "required": ["kind", "size"],
        "additionalProperties": False,
        "properties": {"kind": {"const": "box"}, "size": {"$ref": "#/$defs/size"}},
        "$defs": {
            "size": {
                "type": "object",
                "required": ["w"],
                "additionalProperties": False,
                "properties": {"w": {"type": "number", "minimum": 0, "maximum": 9}},
            }
        },
    },
    {
        "type": "object",
        "required": ["v"],
        "additionalProperties": False,
        "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    },
    {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x"]}],
        "items": False,
        "minItems": 2,
    },
    {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": ["string", "null"], "maxLength": 4},
    {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 8}]},
]


def test_finished_answers_validate(engine: Engine) -> None:
    """All at once, beside free text, greedy and sampled."""
    for n, schema in enumerate(SCHEMAS):
        jsonschema.Draft202012Validator.check_schema(schema)
        for seed, temperature in enumerate((0.0, 1.0, 1.5)):
            asked = constrained(f"{n}-{seed}", "json_schema", schema, temperature=temperature)
            engine.submit(asked, "g")
    engine.submit(ask("free", [5, 6, 7], 20), "g")
    found = run_until_idle(engine)
    assert len(found.tokens["free", 0]) == 20
    finished = 0
    for n, schema in enumerate(SCHEMAS):
        for seed in range(3):
            name = f"{n}-{seed}"
            assert found.reasons[name, 0] in ("stop", "length"), found.receipts[name]
            if found.reasons[name, 0] == "stop":
                finished += 1
                jsonschema.validate(json.loads(answer(found, name)), schema)
    assert finished >= 2 * len(SCHEMAS)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_kind_of_grammar_is_followed(overlap: bool) -> None:
    engine = make(overlap=overlap)
    kinds = {
        "regex": r"[0-9]{3}-[a-f]{2}",
        "lark": 'start: "to" rest?\nrest: " pay" | " pass" rest?',
        "gbnf": 'root ::= ("yes" | "no") "!"',
        "choice": ["north", "south", "south west"],
    }
    for kind, text in kinds.items():
        engine.submit(constrained(kind, kind, text, n=2), "g")
    found = run_until_idle(engine)
    shapes = {
        "regex": r"[0-9]{3}-[a-f]{2}",
        "lark": r"to( pass)*( pay)?",
        "gbnf": r"(yes|no)!",
        "choice": r"north|south( west)?",
    }
    for kind, shape in shapes.items():
        for choice in range(2):
            assert re.fullmatch(shape, answer(found, kind, choice)), answer(found, kind, choice)
            assert found.reasons[kind, choice] == "stop"
    assert all(r.finish_reason == "stop" for r in found.receipts.values())


def test_a_cut_answer_ends_with_length_and_a_whole_one_with_stop(engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 30}
    engine.submit(constrained("cut", "json_schema", schema, 12), "g")
    engine.submit(constrained("whole", "choice", ["a"], 1), "g")
    found = run_until_idle(engine)
    assert found.reasons["cut", 0] == "length" and len(found.tokens["cut", 0]) == 12
    assert found.reasons["whole", 0] == "stop"


def test_a_neighbour_does_not_notice_constrained_rows(engine: Engine) -> None:
    engine.submit(ask("alone", [5, 6, 7], 30), "g")
    alone = run_until_idle(engine).tokens["alone", 0]
    engine.submit(ask("beside", [5, 6, 7], 30), "g")
    engine.submit(constrained("json", "json_schema", SCHEMAS[0]), "g")
    assert run_until_idle(engine).tokens["beside", 0] == alone


DEEP = '{"items":' * 3000 + "{}" + "}" * 3000
BAD: dict[str, tuple[str, Any, str]] = {
    "a megabyte": ("json_schema", {"enum": ["x" * 1_000_000]}, "at most 262144"),
    "not json": ("json_schema", "{", "not JSON"),
    "deep": ("json_schema", DEEP, "nested more than"),
    "a loop": ("json_schema", {"$ref": "#"}, "no finite value"),
    "two in a loop": (
        "json_schema",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "no finite value",
    ),
    "no end": (
        "json_schema",
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
        "no finite value",
    ),
    "arrays without end": (
        "json_schema",
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "no finite value",
    ),
    "elsewhere": ("json_schema", {"$ref": "https://example.com/s"}, "not within the schema"),
    "nowhere": ("json_schema", {"$ref": "#/$defs/x"}, "names nothing"),
    "not expressible": ("json_schema", {"not": {"type": "string"}}, '"not"'),
    "many properties": (
        "json_schema",
        {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}},
        "2000 properties",
    ),
    "exploding patterns": (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(10, 30)]},
        "takes more than",
    ),
    "exploding numbers": (
        "json_schema",
        {"type": "integer", "multipleOf": 9999991},
        "takes more than",
    ),
    "a bad regex": ("regex", "(((", "unclosed group"),
    "look-ahead": ("regex", "(?=a)b", "look-ahead"),
    "nothing matches": ("regex", r"[^\s\S]", "regex"),
    "a rule without end": ("lark", 'start: "a" start', "never ends"),
    "rules without end": ("lark", 'start: "a" x | start "b"\nx: ("c" | x) start', "never ends"),
    "an unknown rule": ("lark", "start: foo", 'unknown name: "foo"'),
    "gbnf without end": ("gbnf", 'root ::= "no" root', "never ends"),
    "no choices": ("choice", [], "list of 1 to"),
    "numbers as choices": ("choice", [1], "string"),
    "another kind": ("xml", "<a/>", "json_schema, regex, lark"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_by_name(engine: Engine, name: str) -> None:
    kind, what, said = BAD[name]
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        engine.submit(constrained("bad", kind, what), "g")
    assert caught.value.code == "invalid_grammar"
    assert len(caught.value.message) < 500
    assert "bad" not in engine.requests
    # The next one is served.
    engine.submit(constrained("good", "choice", ["yes"]), "g")
    assert answer(run_until_idle(engine), "good") == "yes"
    engine.receipts.acknowledge(["good"], "g")


def test_schemas_that_have_an_end_are_served(engine: Engine) -> None:
    tree = {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False}
    nested = {"type": "array", "items": {"$ref": "#"}}
    grammars = []
    for schema in (tree, nested, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, {}):
        grammars.append(Grammar("json_schema", json.dumps(schema)))
    for lark in ('start: "a" start?', 'start: ("a" start)* "b"', 'start: "a" [start] | x\nx: "b"'):
        grammars.append(Grammar("lark", lark))
    for grammar in grammars:
        engine._runner.prepare_grammar(grammar)
        assert engine._runner.grammars.ready(grammar), grammar


def test_integers_without_bounds_end() -> None:
    engine = make()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    lark = f"start: %json {json.dumps(schema | {'additionalProperties': False})}"
    for name, kind, what in (("a", "json_schema", schema), ("b", "lark", lark)):
        engine.submit(constrained(name, kind, what, 40, logit_bias=DIGITS), "g")
    found = run_until_idle(engine)
    assert abs(json.loads(answer(found, "b"))["n"]) < 2**53
    assert re.match(r'\{ ?"n" ?: ?-?[0-9]{16} ?[,}]', answer(found, "a"))


# A model that would write digits for ever.
DIGITS = {TOKENIZER.encode(digit).ids[-1]: 40.0 for digit in "0123456789"}


def test_objects_that_name_their_properties_have_no_others() -> None:
    """As xgrammar and outlines read them, and unless the schema says otherwise."""
    named = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = json.loads(checked_schema(json.dumps(named)))
    assert closed["additionalProperties"] is False
    nested = {"type": "array", "items": {"anyOf": [named, {"type": "null"}]}}
    inner = json.loads(checked_schema(json.dumps(nested)))["items"]["anyOf"][0]
    assert inner["additionalProperties"] is False
    for open_one in (
        {"type": "object"},
        named | {"additionalProperties": True},
        named | {"additionalProperties": {"type": "null"}},
        named | {"required": ["a", "b"]},
        named | {"allOf": [{"properties": {"b": {"type": "null"}}}]},
        named | {"minProperties": 2},
    ):
        kept = json.loads(checked_schema(json.dumps(open_one)))
        assert kept.get("additionalProperties") == open_one.get("additionalProperties")


def test_an_engine_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(MODEL_DIR / name)
    config = EngineConfig(model=str(tmp_path), num_blocks=32, threads=1)
    engine = Engine(config, load_runner(config))
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        engine.submit(constrained("x", "choice", ["a"]), "g")


def test_a_late_mask_delays_only_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.submit(constrained("json", "json_schema", SCHEMAS[0], seed=5), "g")
    expected = run_until_idle(engine).tokens["json", 0]
    fill, calls = Matchers._fill, 0
    monkeypatch.setattr(matchers, "_AT_ONCE_S", -1.0)  # every mask is left to the threads

    def slow(self: Matchers, *given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            time.sleep(0.06)
        fill(self, *given)

    monkeypatch.setattr(Matchers, "_fill", slow)
    engine.receipts.acknowledge(["json"], "g")
    engine.submit(constrained("json", "json_schema", SCHEMAS[0], seed=5), "g")
    engine.submit(ask("free", [5, 6, 7], 60), "g")
    found, steps = Collected(), 0
    while ("free", 0) not in found.reasons:
        engine.step()
        found.take(engine)
        steps += 1
    assert steps <= 62  # one token a step
    run_until_idle(engine, found)
    assert found.tokens["json", 0] == expected
    receipt = found.receipts["json"]
    assert receipt.cached + receipt.computed == receipt.prompt
    assert receipt.recomputed > 0  # the positions of late rows
    assert receipt.generated == receipt.delivered == len(expected)


def test_a_grammar_that_fails_ends_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Matchers, *given: Any) -> None:
        raise ValueError("too many states")

    monkeypatch.setattr(Matchers, "_fill", broken)
    engine.submit(constrained("bad", "choice", ["a"]), "g")
    engine.submit(ask("neighbour", [5, 6, 7], 5), "g")
    found = run_until_idle(engine)
    receipt = found.receipts["bad"]
    assert receipt.finish_reason == "error" and "too many states" in receipt.message
    assert receipt.prompt == receipt.generated == 0
    assert len(found.tokens["neighbour", 0]) == 5


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9"', "é"),
        (r"root ::= [\u00e0-\u00fc]", "é"),
        (r'root ::= "\U0001F44D"', "👍"),
        (r'root ::= "\x41"', "A"),
        (r'root ::= "\u0022"', '"'),
        (r'root ::= "\\u0041"', r"\u0041"),
    ],
)
def test_escapes_of_gbnf_name_code_points(grammar: str, text: str) -> None:
    matcher = LLMatcher(
        LLTokenizer(TOKENIZER.to_str()), source_of(Grammar("gbnf", grammar)), log_level=0
    )
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
