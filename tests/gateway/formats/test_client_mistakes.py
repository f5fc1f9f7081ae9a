"""What people get wrong at first: the answer says what to write instead."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.gateway.deployment import MODEL, Deployment

GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def told(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/model", "/v1/models"),
        ("/embeddings", "/v1/embeddings"),
    ],
)
def test_a_wrong_path_names_the_right_one(deployment: Deployment, path: str, near: str) -> None:
    answer = httpx.post(f"{deployment.url}{path}", json=GOOD, headers=deployment.headers)
    assert f"Did you mean {near}?" in told(answer, 404)


@pytest.mark.parametrize("path", ["/v1/pictures", "/v1", "/x/" * 80])
def test_a_path_like_none_points_to_the_docs(deployment: Deployment, path: str) -> None:
    answer = httpx.post(f"{deployment.url}{path}", json=GOOD, headers=deployment.headers)
    assert told(answer, 404).endswith("See /docs.")


def test_sdks_with_a_wrong_base_url_are_told_how_to_mend_it(deployment: Deployment) -> None:
    client = openai.OpenAI(base_url=deployment.url, api_key=deployment.key, max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match="End the base URL with /v1"):
        client.chat.completions.create(**GOOD)
    url = f"{deployment.url}/v1"
    claude = anthropic.Anthropic(base_url=url, api_key=deployment.key, max_retries=0)
    with claude, pytest.raises(anthropic.NotFoundError, match="remove it from the base URL"):
        claude.messages.create(**GOOD)


def test_a_wrong_method_names_the_right_one(deployment: Deployment) -> None:
    answer = httpx.get(f"{deployment.url}/v1/completions", headers=deployment.headers)
    assert told(answer, 405) == "/v1/completions does not take GET. Use POST."
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("value", ["KEY", "Basic KEY", "Bearer", "Token KEY"])
def test_a_credential_in_the_wrong_form_is_told_the_right_one(
    deployment: Deployment, value: str
) -> None:
    headers = {"authorization": value.replace("KEY", deployment.key)}
    answer = httpx.post(f"{deployment.url}/v1/chat/completions", json=GOOD, headers=headers)
    assert "Write it as `Bearer th_…`" in told(answer, 401)


def test_an_unknown_model_is_told_which_there_are(deployment: Deployment) -> None:
    body = {**GOOD, "model": "gpt-4o"}
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions", json=body, headers=deployment.headers
    )
    assert f"it may use: {MODEL}" in told(answer, 404)


def test_the_pages_still_open_with_and_without_a_slash(deployment: Deployment) -> None:
    for path in ("/dashboard", "/dashboard/", "/docs", "/"):
        answer = httpx.get(f"{deployment.url}{path}", follow_redirects=True)
        assert answer.status_code == 200, path
        assert "text/html" in answer.headers["content-type"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.images.generate(prompt="x"),
        lambda client: client.audio.speech.create(input="x", model=MODEL, voice="alloy"),
        lambda client: client.audio.transcriptions.create(file=b"x", model=MODEL),
        lambda client: client.fine_tuning.jobs.list(),
        lambda client: client.responses.compact(model=MODEL, input="Hi"),
        lambda client: client.vector_stores.list(),
        lambda client: client.post("/realtime/sessions", body={}, cast_to=object),
    ],
)
def test_an_endpoint_that_is_not_served_is_refused_by_name(
    deployment: Deployment, ask: Any
) -> None:
    url = f"{deployment.url}/v1"
    client = openai.OpenAI(base_url=url, api_key=deployment.key, max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match="is not supported by") as caught:
        ask(client)
    assert caught.value.code == "unsupported_endpoint"
