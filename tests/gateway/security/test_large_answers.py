"""Issue 14, part 9: no large answer of an upstream stops the event loop, which all tenants share."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.upstreams import Upstream
from gateway.engines.clients import Engines
from gateway.engines.openai import OpenAIEngine
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.security.large_upstream import PROSE, TEXT, VECTORS, WIDTH
from tests.gateway.security.loop_lag import as_served
from tests.gateway.security.test_loop_pauses import assert_no_pause, post

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    command = [sys.executable, "-m", "tests.gateway.security.large_upstream"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    codec = load_codec(MODEL_DIR)
    upstream = Upstream(
        f"http://127.0.0.1:{int(server.stdout.readline())}",
        model=MODEL,
        capabilities=("embeddings", "tools"),
        shared_cache=True,
    )
    engine = OpenAIEngine(upstream, MODEL, None, lambda text: len(codec.encode(text)))
    model = ServedModel(MODEL, codec, 150_000, 0, capabilities=frozenset(("embeddings", "tools")))
    engines = Engines({MODEL: [engine]}, [model])
    try:
        path = tmp_path_factory.mktemp("large")
        with running_deployment(path, engines=engines) as made, as_served():
            yield made
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


def chat(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{kind} please"}],
        "max_tokens": 140_000,
        **fields,
    }


def streamed(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("kind", ["text", "unmeasured"])
def test_a_whole_text_stops_nobody(deployment: Deployment, kind: str) -> None:
    answer = assert_no_pause(deployment, CHAT, chat(kind), 200).json()
    assert answer["choices"][0]["message"]["content"] == TEXT


def test_logprobs_stop_nobody(deployment: Deployment) -> None:
    body = chat("logprobs", logprobs=True)
    choice = assert_no_pause(deployment, CHAT, body, 200).json()["choices"][0]
    listed = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in listed) == choice["message"]["content"]
    assert choice["message"]["content"] == PROSE * 1_500


def test_a_large_tool_call_stops_nobody(deployment: Deployment) -> None:
    answer = assert_no_pause(deployment, CHAT, chat("call", tools=[TOOL]), 200).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"text": TEXT}


@pytest.mark.parametrize(
    ("kind", "size"),
    [("events", 4_000), ("delta", 5_000), ("uncounted", 5_000)],
)
def test_a_stream_stops_nobody(deployment: Deployment, kind: str, size: int) -> None:
    events = streamed(assert_no_pause(deployment, CHAT, chat(kind, stream=True), 200).text)
    said = [each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"]]
    assert "".join(said) == PROSE * size


def test_streamed_arguments_stop_nobody(deployment: Deployment) -> None:
    body = chat("arguments", stream=True, tools=[TOOL])
    events = streamed(assert_no_pause(deployment, CHAT, body, 200).text)
    calls = [call for each in events for call in each["choices"][0]["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"text": PROSE * 4_000}


def test_embeddings_stop_nobody(deployment: Deployment) -> None:
    body = {"model": MODEL, "input": ["a"] * VECTORS}
    answer = assert_no_pause(deployment, "/v1/embeddings", body, 200).json()
    assert [each["index"] for each in answer["data"]] == list(range(VECTORS))
    assert answer["data"][5]["embedding"][2] == pytest.approx(2.123456789 / WIDTH)


def test_a_line_that_never_ends_is_refused(deployment: Deployment) -> None:
    refused = assert_no_pause(deployment, CHAT, chat("endless", stream=True), 503)
    assert refused.json()["error"]["code"] == "engine_unavailable"


def test_the_upstream_still_answers(deployment: Deployment) -> None:
    assert post(deployment, CHAT, chat("hello")).status_code == 200
