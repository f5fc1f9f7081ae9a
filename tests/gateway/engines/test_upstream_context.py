"""The context of an upstream that does not declare it: asked for, or left to the server."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from gateway.engines.openai_context import context_of
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
LONG: Any = [{"role": "user", "content": "toll " * 12_000}]  # about 15,000 tokens by estimate
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
ANSWER = {
    "choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": USAGE,
}


@pytest.fixture
def server() -> Iterator[Server]:
    with upstream() as made:
        made.answers[PATH] = ANSWER
        yield made


def gateway(server: Server, path: Path) -> Any:
    entry = {"url": server.url, "name": "u", "model": "far"}
    return running_deployment(path, settings={"upstreams": json.dumps([entry])}, engines=None)


def priced(made: Deployment) -> OpenAI:
    with made.services.database.transaction() as session:
        ensure_default_prices(session, SystemClock(), "far")
    made.services.prices.refresh()
    return OpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0, timeout=60)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_unknown_context_is_left_to_the_server(server: Server, tmp_path: Path) -> None:
    with gateway(server, tmp_path) as made, priced(made) as client:
        client.chat.completions.create(model="far", messages=LONG)
        assert "max_tokens" not in server.asked[-1][1]
        client.chat.completions.create(model="far", messages=LONG, max_tokens=9000)
        assert server.asked[-1][1]["max_tokens"] == 9000
        assert client.models.retrieve("far").to_dict()["context_length"] is None


def test_the_server_is_asked_for_its_context(server: Server, tmp_path: Path) -> None:
    server.pages["/v1/models"] = {"data": [{"id": "far", "max_model_len": 2048}]}
    with gateway(server, tmp_path) as made, priced(made) as client:
        until(lambda: made.services.catalog.first().context_length == 2048)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="far", messages=LONG)
        assert caught.value.code == "context_length_exceeded"
        assert client.models.retrieve("far").to_dict()["context_length"] == 2048
        client.chat.completions.create(model="far", messages=[{"role": "user", "content": "Hi"}])
        assert "max_tokens" not in server.asked[-1][1]


@pytest.mark.parametrize(
    ("models", "props", "expected"),
    [
        ({"data": [{"id": "a", "max_model_len": 9}, {"id": "far", "max_model_len": 8}]}, {}, 8),
        ({"data": [{"id": "far", "context_window": 7}]}, {}, 7),
        ({"data": [{"id": "other", "context_length": 6}]}, {}, 6),
        (
            {"data": [{"id": "far", "meta": {"n_ctx_train": 99}}]},
            {"default_generation_settings": {"n_ctx": 5}},
            5,
        ),
        ({"data": []}, {}, 0),
        ({"data": [{"id": "far", "max_model_len": "9"}]}, [], 0),
        (None, "x", 0),
    ],
)
def test_servers_say_it_in_their_own_words(models: Any, props: Any, expected: int) -> None:
    pages = [json.dumps(page).encode() for page in (models, props)]
    assert context_of(pages[0], pages[1], "far") == expected
