"""Chat parameters beyond text: legacy functions, many choices, media, and what upstreams declare."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
ASK: Any = [{"role": "user", "content": "How is the weather?"}]
FUNCTION: Any = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
PIXEL = "data:image/png;base64,iVBORw0KGgo="
IMAGE: Any = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
AUDIO: Any = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
USAGE = {"prompt_tokens": 700, "completion_tokens": 2, "total_tokens": 702}


@pytest.fixture
def says_call(deployment: Deployment) -> Iterator[None]:
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    deployment.engine.script = [*codec.encode(CALL, special=True), codec.eos_token_ids[0]]
    yield
    deployment.engine.script = None


@pytest.mark.usefixtures("says_call")
def test_legacy_functions_are_called_in_their_own_words(
    deployment: Deployment, client: OpenAI
) -> None:
    more: Any = {"model": MODEL, "messages": ASK, "functions": [FUNCTION], "max_tokens": 200}
    choice = client.chat.completions.create(**more).choices[0]
    call = choice.message.function_call
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert call is not None and call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Bern"}
    deltas = [each.choices[0] for each in client.chat.completions.create(**more, stream=True)]
    parts = [each.delta.function_call for each in deltas if each.delta.function_call]
    assert [(part.name, part.arguments) for part in parts] == [("weather", call.arguments)]
    assert deltas[-1].finish_reason == "function_call"
    history: Any = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": call.to_dict()},
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    client.chat.completions.create(**(more | {"messages": history, "max_tokens": 2}))
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    assert "sun" in codec.decode(list(deployment.engine.submitted[-1].prompt))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "always"}, "function_call"),
        ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]}, "functions"),
        ({"metadata": {"run": "1"}}, "metadata"),
        ({"n": 129}, "n"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
        ({"prediction": {"type": "content", "content": "x", "weight": 2}}, "prediction"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"extra_body": {"route": "fast"}}, "route"),
        ({"verbosity": "low"}, "verbosity"),
        ({"extra_body": {"prompt_cache_options": {"mode": "x"}}}, "prompt_cache_options"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "messages[0].content[1]",
        ),
        ({"messages": [{"role": "user", "content": [AUDIO]}]}, "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_what_the_model_lacks_is_refused_by_name(client: OpenAI, more: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **({"model": MODEL, "messages": ASK, "max_tokens": 2} | more)
        )
    assert caught.value.param == param


def test_a_chat_has_up_to_128_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, n=128, max_tokens=1)
    assert [each.index for each in answer.choices] == list(range(128))
    assert answer.usage is not None and answer.usage.completion_tokens == 128


@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_is_guessed_from_and_not_charged(
    deployment: Deployment, client: OpenAI, parts: bool
) -> None:
    text = "A toll is a fee. " * 300
    content: Any = [{"type": "text", "text": text}] if parts else text
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 3}
    plain = client.chat.completions.create(**asked)
    assert deployment.engine.submitted[-1].prediction == []
    answer = client.chat.completions.create(
        **asked, prediction={"type": "content", "content": content}
    )
    codec = deployment.services.catalog.first().codec
    assert codec is not None
    sent = deployment.engine.submitted[-1]
    context = deployment.services.catalog.first().context_length
    assert sent.prediction == codec.encode(text)[:context] and len(sent.prediction) > 500
    assert answer.usage is not None and plain.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens == len(sent.prompt)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        made.also = frozenset(("route",))
        made.answers[PATH] = {"choices": [choice], "usage": USAGE}
        yield made


@pytest.fixture(scope="module")
def seeing(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": "seeing", "capabilities": ["images", "audio"]}
    entry["parameters"] = ["reasoning_effort", "prediction", "service_tier"]
    entry["extra_fields"] = ["route", "verbosity"]
    settings = {"upstreams": json.dumps([entry])}
    path = tmp_path_factory.mktemp("seeing")
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "seeing")
        made.services.prices.refresh()
        yield made


def test_an_upstream_gets_what_its_entry_declares(seeing: Deployment, server: Server) -> None:
    content = [{"type": "text", "text": "What is this?", "rank": 1}, IMAGE, AUDIO]
    sent: Any = {
        "reasoning_effort": "low",
        "prediction": {"type": "content", "content": "a cat"},
        "service_tier": "priority",
    }
    with OpenAI(base_url=f"{seeing.url}/v1", api_key=seeing.key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="seeing",
            messages=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]
            extra_body={"route": "fast"},
            **sent,
        )
    assert answer.choices[0].message.content == "yes"
    body = server.asked[-1][1]
    assert {name: body[name] for name in sent} == sent and body["route"] == "fast"
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "What is this?"}, IMAGE, AUDIO,
    ]  # fmt: skip
    assert "images" not in body and "audio" not in body
    (event,) = seeing.events(1)
    assert (event["input_tokens"], event["output_tokens"]) == (700, 2)


def test_verbosity_reaches_an_upstream_that_declares_it(
    seeing: Deployment, server: Server, client: OpenAI
) -> None:
    with OpenAI(base_url=f"{seeing.url}/v1", api_key=seeing.key, max_retries=0) as sdk:
        sdk.chat.completions.create(model="seeing", messages=ASK, verbosity="low")
        assert server.asked[-1][1]["verbosity"] == "low"
        answer = sdk.responses.create(model="seeing", input="Hi", text={"verbosity": "high"})
        assert server.asked[-1][1]["verbosity"] == "high"
        assert answer.text is not None and answer.text.verbosity == "high"
        sdk.chat.completions.create(model="seeing", messages=ASK, verbosity="medium")
        assert "verbosity" not in server.asked[-1][1]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", text={"verbosity": "low"})
    assert caught.value.param == "text.verbosity"


@pytest.mark.parametrize("url", ["http://10.0.0.1/x.png", "file:///etc/passwd", ""])
def test_an_image_is_data_or_behind_https(seeing: Deployment, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with (
        OpenAI(base_url=f"{seeing.url}/v1", api_key=seeing.key, max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="https: URL"),
    ):
        client.chat.completions.create(
            model="seeing",
            messages=[{"role": "user", "content": [part]}],  # type: ignore[misc, list-item]
        )
