"""A prompt that does not fit is refused on /v1/messages in the words that agents look for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from gateway.engines.upstream_errors import error_of_status
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PROMPT = re.compile(r"^prompt is too long: (\d+) tokens > (\d+) maximum")
OUTPUT = re.compile(r"^input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")

# (what a server says, the counts in it: prompt, output, context)
SAID: list[tuple[str, tuple[int | None, int | None, int | None]]] = [
    (
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
        "(3000 in the messages, 2000 in the completion).",
        (3000, 2000, 4096),
    ),
    (
        "maximum context length is 4096 tokens. However, you requested 5000 tokens",
        (5000, None, 4096),
    ),
    (
        "maximum context length is 8192 tokens. However, you requested 100 output tokens and your "
        "prompt contains at least 8100 input tokens",
        (8100, 100, 8192),
    ),
    (
        "the request exceeds the available context size (4096 tokens)",
        (None, None, 4096),
    ),
    ("prompt is too long: 208310 tokens > 200000 maximum", (208310, None, 200000)),
    (
        "input length and `max_tokens` exceed context limit: 187254 + 20000 > 200000",
        (187254, 20000, 200000),
    ),
    (
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and "
        "1000 `max_new_tokens`",
        (4000, 1000, 4096),
    ),
    (
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        (5000, None, 4096),
    ),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context "
        "length is 4096 tokens and your request has 200 input tokens (4000 > 4096 - 200).",
        (200, 4000, 4096),
    ),
    (
        "context_length_exceeded: The model's context is 4096 tokens; the prompt has 200 and "
        "max_tokens is 4000.",
        (200, 4000, 4096),
    ),
    ("context length exceeded", (None, None, None)),
]


@pytest.mark.parametrize(("said", "counts"), SAID)
def test_the_counts_of_a_servers_refusal(said: str, counts: tuple[int | None, ...]) -> None:
    error: Any = error_of_status("u", "r", 400, json.dumps({"error": {"message": said}}).encode())
    assert error.code == "context_length_exceeded"
    assert (error.prompt_tokens, error.max_tokens, error.limit) == counts


def test_llama_cpps_fields_are_read() -> None:
    said = {"message": "exceeds the context size", "n_prompt_tokens": 5000, "n_ctx": 4096}
    error: Any = error_of_status("u", "r", 400, json.dumps({"error": said}).encode())
    assert (error.prompt_tokens, error.limit) == (5000, 4096)


@pytest.fixture
def claude(deployment: Deployment) -> Iterator[Anthropic]:
    with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as made:
        yield made


def refused(claude: Anthropic, prompt: str, most: int, *, stream: bool = False) -> str:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**asked, max_tokens=most, stream=stream)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    return str(body["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_refusals_have_anthropics_words(
    claude: Anthropic, deployment: Deployment, stream: bool
) -> None:
    served = deployment.services.catalog.first()
    found = PROMPT.match(refused(claude, "word " * 9000, 4, stream=stream))
    assert found is not None and int(found[2]) == served.context_length
    assert int(found[1]) > served.context_length


@pytest.fixture(scope="module")
def reseller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Server]]:
    with upstream() as server:
        settings = {"upstreams": json.dumps([{"url": server.url, "name": "u", "model": MODEL}])}
        path = tmp_path_factory.mktemp("reseller")
        with running_deployment(path, engines=None, settings=settings) as made:
            yield made, server


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (SAID[0][0], OUTPUT),
        (SAID[1][0], PROMPT),
        (SAID[3][0], re.compile("^prompt is too long: ")),
    ],
)
def test_an_upstreams_refusals_have_them_too(
    reseller: tuple[Deployment, Server], said: str, words: re.Pattern[str]
) -> None:
    deployment, server = reseller
    server.answers["/v1/chat/completions"] = {"error": {"message": said}}
    server.statuses["/v1/chat/completions"] = 400
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{deployment.url}/v1/messages", json=body, headers=deployment.headers)
    assert answer.status_code == 400 and words.match(answer.json()["error"]["message"])
