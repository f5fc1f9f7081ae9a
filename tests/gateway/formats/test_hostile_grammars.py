"""Grammars that cannot be served: 400 with the field, the cause and the next step, while a neighbour's
answer takes as many steps as it would alone."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine.decoding.grammar.checker import GrammarChecker
from engine.protocol import Grammar
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.own_engine import deployment_on_own_engine

TURNS = [{"role": "user", "content": "Hi"}]
TEXT = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}
CHAT = {"model": MODEL, "messages": TURNS, "max_tokens": 5}
RESPONSE = {"model": MODEL, "input": "Hi", "max_output_tokens": 16}
MEGABYTE: Any = {"enum": ["x" * 1_000_000]}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NO_LEAF = {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}
EXPLODING = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(10, 30)]}


def tool(schema: Any) -> dict[str, Any]:
    return {"name": "f", "parameters": schema, "strict": True}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# path, body, the field that the error names, the cause
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a megabyte": ("chat/completions", CHAT | {"response_format": form(MEGABYTE)},
                   "response_format", "1000014 bytes, at most 262144"),
    "a megabyte of regex": ("completions", TEXT | {"guided_regex": "a|" * 500_000},
                            "guided_regex", "1000000 bytes, at most 262144"),
    "a loop": ("completions", TEXT | {"guided_json": {"$ref": "#"}},
               "guided_json", "no finite value"),
    "two in a loop": ("chat/completions", CHAT | {"structured_outputs": {"json": LOOP}},
                      "structured_outputs.json", "no finite value"),
    "recursion without a leaf": (
        "responses",
        RESPONSE | {"text": {"format": {"type": "json_schema", "name": "x", "schema": NO_LEAF}}},
        "text.format", "no finite value"),
    "recursion in a tool": (
        "responses", RESPONSE | {"tools": [{"type": "function", **tool(NO_LEAF)}]},
        "tools", "no finite value"),
    "exploding patterns": ("chat/completions", CHAT | {"response_format": form(EXPLODING)},
                           "response_format", "simplify it"),
    "an exploding regex": ("chat/completions", CHAT | {"guided_regex": "((a{1000}){1000}){1000}"},
                           "guided_regex", "simplify it"),
    "a regex of too many parts": ("completions", TEXT | {"guided_regex": "(.{0,5000}a){50}"},
                                  "guided_regex", "too many expressions constructed: simplify it"),
    "a grammar without end": ("completions", TEXT | {"guided_grammar": 'start: "a" start'},
                              "guided_grammar", "never ends"),
    "a gbnf without end": (
        "completions", TEXT | {"structured_outputs": {"grammar": 'root ::= "no" root'}},
        "structured_outputs.grammar", "never ends"),
    "too many repeats": ("completions", TEXT | {"guided_grammar": 'start: ("a"{1000}){100000}'},
                         "guided_grammar", "lark cannot be served"),
}  # fmt: skip


@dataclass
class Gate:
    """Holds up the grammars that the engine tries."""

    check: Callable[[GrammarChecker, Grammar], str]
    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, checker: GrammarChecker, grammar: Grammar) -> str:
        self.entered.set()
        assert self.opened.wait(120)
        return self.check(checker, grammar)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    found = Gate(GrammarChecker.check)

    def check(checker: GrammarChecker, grammar: Grammar) -> str:
        return found(checker, grammar)

    monkeypatch.setattr(GrammarChecker, "check", check)
    return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("hostile")
    with deployment_on_own_engine(folder, num_blocks=512) as running:
        send(running, "completions", TEXT)
        yield running


def send(deployment: Deployment, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{deployment.url}/v1/{path}", headers=deployment.headers, json=body, timeout=120
    )


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name_and_a_neighbour_goes_on(
    deployment: Deployment, gate: Gate, name: str
) -> None:
    path, body, param, cause = CASES[name]
    answers: list[httpx.Response] = []
    bad = threading.Thread(target=lambda: answers.append(send(deployment, path, body)))
    bad.start()
    try:
        while bad.is_alive() and not gate.entered.wait(0.01):
            pass
        # A whole answer while the grammar waits to be tried, or has been refused unread.
        counters = deployment.worker.engine.metrics.counters
        before = counters["steps"]
        whole = TEXT | {"max_tokens": 40, "ignore_eos": True}
        assert send(deployment, "completions", whole).json()["usage"]["completion_tokens"] == 40
        assert counters["steps"] - before <= 40
    finally:
        gate.opened.set()
        bad.join()
    (answer,) = answers
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "invalid_grammar", error
    assert error["param"] == param
    assert cause in error["message"] and error["message"].endswith(f"Correct {param}.")
    assert len(answer.content) < 1000
    assert gate.entered.is_set() == ("megabyte" not in name)
    events = deployment.events(0, request_id=answer.headers["x-request-id"])
    assert all(each["output_tokens"] == each["input_tokens"] == 0 for each in events)


def test_on_anthropics_surface_the_message_names_the_field(deployment: Deployment) -> None:
    for schema, cause in ((MEGABYTE, "at most 262144"), (NO_LEAF, "no finite value")):
        body = CHAT | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        answer = send(deployment, "messages", body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert cause in error["message"]
        assert error["message"].endswith("Correct output_config.format.")
