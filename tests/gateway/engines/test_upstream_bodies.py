"""What upstreams are sent: OpenAI's fields alone, and the length of answer that clients ask for."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from core import logs
from core.clock import SystemClock
from core.errors import SettingError
from gateway.catalog.upstreams import read_upstreams
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream
from tests.gateway.openai_schema import FILE, faults

PATH = "/v1/chat/completions"
CONTEXT = 4096
MARK = {"cache_control": {"type": "ephemeral"}}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
SAID = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
ANSWER = {"choices": [SAID], "usage": USAGE}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOL = {"type": "function", "function": FUNCTION}
ASK = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}

# (route, what a client may send there)
CLIENTS: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"messages": [{"role": "user", "content": "Hi", **MARK}]}),
    (PATH, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]}]}),
    (PATH, {"messages": [ASK], "tools": [{**TOOL, **MARK}]}),
    (
        PATH,
        {
            "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
            "tools": [TOOL],
        },
    ),
    (
        PATH,
        {
            "messages": [ASK, {"role": "assistant", "content": [], "tool_calls": [CALL]}, RESULT],
            "tools": [TOOL],
        },
    ),
    (
        PATH,
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": "Well", "reasoning_content": "I think"},
                {"role": "user", "content": [{"type": "text", "text": "and?", "rank": 1}]},
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 50,
            "system": [{"type": "text", "text": "Be brief", **MARK}],
            "tools": [{"name": "weather", "input_schema": SCHEMA, **MARK}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I think", "signature": "c2ln"},
                        {"type": "tool_use", "id": "t", "name": "weather", "input": {}, **MARK},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": "rain", **MARK}
                    ],
                },
            ],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
        },
    ),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 5}),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Server]]:
    with upstream() as server:
        entry = {"url": server.url, "name": "u", "model": "able", "context_length": CONTEXT}
        entry["capabilities"] = ["tools", "json"]
        settings = {"upstreams": json.dumps([entry])}
        folder = tmp_path_factory.mktemp("bodies")
        with running_deployment(folder, settings=settings, engines=None) as made:
            with made.services.database.transaction() as session:
                ensure_default_prices(session, SystemClock(), "able")
            made.services.prices.refresh()
            yield made, server


def post(made: Deployment, route: str, body: dict[str, Any]) -> httpx.Response:
    body = {"model": "able", **body}
    return httpx.post(f"{made.url}{route}", json=body, headers=made.headers, timeout=60)


def asked(served: tuple[Deployment, Server], route: str, body: dict[str, Any]) -> dict[str, Any]:
    made, server = served
    server.answers[PATH] = ANSWER
    server.answers["/v1/completions"] = {"choices": [{"index": 0, "text": "yes"}], "usage": USAGE}
    answer = post(made, route, body)
    assert answer.status_code == 200, answer.text
    return server.asked[-1][1]


@pytest.mark.parametrize(("route", "body"), CLIENTS)
def test_bodies_have_the_fields_of_openais_api(
    served: tuple[Deployment, Server], route: str, body: dict[str, Any]
) -> None:
    if not FILE.is_file():
        pytest.skip(f"OpenAI's document is not at {FILE}; set TOLLHOUSE_SPECS_DIR to its directory")
    sent = asked(served, route, body)
    assert faults("/v1/completions" if "prompt" in sent else PATH, sent) == []


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{**ASK, **MARK}]},
        {"messages": [ASK], "tools": [{**TOOL, **MARK}]},
        {"messages": [{"role": "assistant", "content": [], "tool_calls": [CALL]}]},
        {"messages": [ASK], "unheard_of": 1},
    ],
)
def test_the_check_of_bodies_finds_what_strict_servers_refuse(body: dict[str, Any]) -> None:
    if not FILE.is_file():
        pytest.skip(f"OpenAI's document is not at {FILE}; set TOLLHOUSE_SPECS_DIR to its directory")
    assert faults(PATH, {"model": "able", **body})


@pytest.mark.parametrize(
    ("route", "body", "sent"),
    [
        (PATH, {"messages": [ASK]}, None),
        (PATH, {"messages": [ASK], "max_tokens": 9}, 9),
        ("/v1/responses", {"input": "Hi"}, None),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 9}, 9),
        ("/v1/messages", {"messages": [ASK], "max_tokens": 9}, 9),
        ("/v1/messages", {"messages": [ASK], "max_tokens": CONTEXT}, None),  # reduced to the rest
        ("/v1/completions", {"prompt": "Hi"}, 16),  # OpenAI's default
    ],
)
def test_only_the_server_knows_the_rest_of_its_context(
    served: tuple[Deployment, Server], route: str, body: dict[str, Any], sent: int | None
) -> None:
    assert asked(served, route, body).get("max_tokens") == sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        "'max_tokens' or 'max_completion_tokens' is too large: {most}. This model's maximum context "
        "length is 4096 tokens and your request has {prompt} input tokens ({most} > 4096 - {prompt}).",
        "The model's context is 4096 tokens; the prompt has {prompt} and max_tokens is {most}.",
    ],
)
def test_a_length_that_may_be_reduced_is_asked_for_again(
    served: tuple[Deployment, Server], said: str, stream: bool
) -> None:
    made, server = served
    prompt, most = 2000, 4000

    def _answer(body: dict[str, Any]) -> Any:
        fits = prompt + body["max_tokens"] <= CONTEXT
        server.statuses[PATH] = 200 if fits else 400
        if not fits:
            text = said.format(prompt=prompt, most=body["max_tokens"])
            return {"error": {"message": text, "code": "context_length_exceeded"}}
        if not body["stream"]:
            return ANSWER
        delta = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
        return [{"choices": [delta]}, {"choices": [], "usage": USAGE}]

    server.answers[PATH] = _answer
    before = len(server.asked)
    answer = post(made, "/v1/messages", {"messages": [ASK], "max_tokens": most, "stream": stream})
    assert answer.status_code == 200 and "yes" in answer.text
    assert [body["max_tokens"] for _, body in server.asked[before:]] == [most, CONTEXT - prompt]
    # A number that the client set itself is its own: the refusal is the answer.
    refused = post(made, PATH, {"messages": [ASK], "max_tokens": most})
    server.statuses[PATH] = 200
    assert (
        refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    )
    assert len(server.asked) == before + 3


def test_log_lines_of_a_connection_have_the_id_of_each_request(
    served: tuple[Deployment, Server], caplog: pytest.LogCaptureFixture
) -> None:
    made, server = served
    server.answers[PATH] = {"error": {"message": "no such thing"}}
    server.statuses[PATH] = 400
    ids: list[tuple[str, str]] = []  # in the brackets, in the text

    class Reading(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no such thing" in record.getMessage():
                ids.append((logs.request_id.get(), record.getMessage()))

    handler = Reading()
    logging.getLogger("tollhouse.upstream").addHandler(handler)
    told = [post(made, PATH, {"messages": [ASK]}).headers["x-request-id"] for _ in range(3)]
    logging.getLogger("tollhouse.upstream").removeHandler(handler)
    server.statuses[PATH] = 200
    assert [bracket for bracket, _ in ids] == told
    assert all(bracket in text for bracket, text in ids)


def test_two_entries_of_one_url_need_names() -> None:
    entry = {"url": "http://127.0.0.1:1", "model": "a"}
    with pytest.raises(SettingError, match="set `name`"):
        read_upstreams(json.dumps([entry, {**entry, "model": "b"}]))
    named = [{**entry, "name": "a"}, {**entry, "name": "b", "model": "b"}]
    assert [each.replica_name for each in read_upstreams(json.dumps(named))] == ["a", "b"]
