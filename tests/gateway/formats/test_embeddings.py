"""/v1/embeddings: an upstream makes them, and the gateway admits, screens, meters and bills them."""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import BadRequestError, OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.clients import Engines, make_engines
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream
from tests.gateway.formats.test_openapi_conformance import check, document

__all__ = ["document"]
PATH = "/v1/embeddings"


def vectors(body: dict[str, Any]) -> dict[str, Any]:
    """In the other order, as a server may answer; 3 tokens an input."""
    wide = body.get("dimensions", 4)
    rows = [
        {"object": "embedding", "index": i, "embedding": [i + 0.5] * wide}
        for i in range(len(body["input"]))
    ]
    usage = {"prompt_tokens": 3 * len(rows), "total_tokens": 3 * len(rows)}
    return {"object": "list", "data": rows[::-1], "model": "theirs", "usage": usage}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        made.answers[PATH] = vectors
        yield made


@pytest.fixture(scope="module")
def embedding_deployment(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    entries = [
        {"url": server.url, "name": "e", "model": "vec", "upstream_model": "theirs"},
        {"url": f"{server.url}/", "name": "t", "model": "plain"},
    ]
    entries[0]["capabilities"] = ["embeddings"]  # type: ignore[assignment]
    settings = {"upstreams": json.dumps(entries)}
    path = tmp_path_factory.mktemp("embeddings")
    with running_deployment(
        path, settings=settings, engines=_engines(path, settings["upstreams"])
    ) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "vec")
        made.services.prices.refresh()
        yield made


def _engines(path: Path, text: str) -> Engines:
    from core.settings import Settings

    return make_engines(
        Settings(data_dir=path), read_upstreams(text), lambda _r: None, lambda _n, _e: None
    )


@pytest.fixture
def embedder(embedding_deployment: Deployment) -> Iterator[OpenAI]:
    url = f"{embedding_deployment.url}/v1"
    with OpenAI(base_url=url, api_key=embedding_deployment.key, max_retries=0, timeout=60) as made:
        yield made


def test_the_sdk_gets_vectors_in_order_and_the_ledger_the_upstreams_count(
    embedding_deployment: Deployment, embedder: OpenAI, server: Server
) -> None:
    answer = embedder.embeddings.create(model="vec", input=["one", "two"], user="ada")
    assert [row.embedding for row in answer.data] == [[0.5] * 4, [1.5] * 4]
    assert answer.usage.prompt_tokens == 6 and answer.model == "vec"
    assert server.asked[-1][1]["model"] == "theirs"
    event = embedding_deployment.event(answer._request_id)
    assert (event["kind"], event["route"], event["model"]) == ("embedding", PATH, "vec")
    assert (event["input_tokens"], event["output_tokens"]) == (6, 0)
    assert (event["status"], event["end_user"], event["engine_id"]) == (200, "ada", "e")


@pytest.mark.parametrize("given", ["a text", ["one", "two"]])
def test_texts_and_options_pass(embedder: OpenAI, server: Server, given: Any) -> None:
    answer = embedder.embeddings.create(
        model="vec", input=given, dimensions=2, encoding_format="float"
    )
    assert len(answer.data[0].embedding) == 2
    body = server.asked[-1][1]
    assert body["dimensions"] == 2 and body["encoding_format"] == "float"
    assert len(body["input"]) == (2 if isinstance(given, list) else 1)


@pytest.mark.parametrize("given", [[1, 2, 3], [[1, 2], [3]]])
def test_token_ids_without_a_tokenizer_are_refused(
    embedder: OpenAI, server: Server, given: Any
) -> None:
    """They can be neither counted nor screened."""
    before = len(server.asked)
    with pytest.raises(BadRequestError, match="tokenizer is not known"):
        embedder.embeddings.create(model="vec", input=given)
    assert len(server.asked) == before


def test_base64_is_made_where_the_upstream_sends_numbers(embedding_deployment: Deployment) -> None:
    body = {"model": "vec", "input": "x", "encoding_format": "base64"}
    answer = httpx.post(
        f"{embedding_deployment.url}{PATH}", json=body, headers=embedding_deployment.headers
    )
    packed = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert struct.unpack("<4f", packed) == (0.5,) * 4


def test_the_answer_is_as_openais_document_says(
    document: dict[str, Any], embedding_deployment: Deployment
) -> None:
    body = {"model": "vec", "input": ["x", "y"]}
    answer = httpx.post(
        f"{embedding_deployment.url}{PATH}", json=body, headers=embedding_deployment.headers
    )
    check(document, "CreateEmbeddingResponse", answer.json())


def test_every_step_is_passed(
    embedding_deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = embedding_deployment.steps(monkeypatch)
    body = {"model": "vec", "input": "x"}
    answer = httpx.post(
        f"{embedding_deployment.url}{PATH}", json=body, headers=embedding_deployment.headers
    )
    assert answer.status_code == 200
    assert steps == ["principal", "reserve", "screen", "open", "close"]


@pytest.mark.parametrize("given", ["", [], ["a", ""], [1, "a"], [[1], []], {"a": 1}, ["x"] * 2049])
def test_wrong_inputs_are_refused(embedding_deployment: Deployment, given: Any) -> None:
    body = {"model": "vec", "input": given}
    answer = httpx.post(
        f"{embedding_deployment.url}{PATH}", json=body, headers=embedding_deployment.headers
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input"


def test_a_model_that_makes_none_says_so(
    embedding_deployment: Deployment, embedder: OpenAI, deployment: Deployment, client: OpenAI
) -> None:
    for sdk, model in ((embedder, "plain"), (client, MODEL)):
        with pytest.raises(openai.NotFoundError) as told:
            sdk.embeddings.create(model=model, input="x")
        assert told.value.code == "embeddings_not_supported"


def test_a_failing_upstream_is_named_and_nothing_is_charged(
    embedding_deployment: Deployment, embedder: OpenAI, server: Server
) -> None:
    server.statuses[PATH] = 500
    try:
        with pytest.raises(openai.APIStatusError) as told:
            embedder.embeddings.create(model="vec", input="x")
    finally:
        server.statuses.clear()
    assert told.value.status_code == 503
    event = embedding_deployment.event(told.value.request_id)
    assert (event["input_tokens"], event["output_tokens"]) == (0, 0)


def test_langchain_embeds(embedding_deployment: Deployment) -> None:
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(
        base_url=f"{embedding_deployment.url}/v1",
        api_key=embedding_deployment.key,
        model="vec",
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    assert made.embed_documents(["a", "b"]) == [[0.5] * 4, [1.5] * 4]
