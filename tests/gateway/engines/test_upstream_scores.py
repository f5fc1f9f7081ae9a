"""/v1/rerank and /v1/score of an upstream that declares them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from gateway.engines.upstream_scores import scores_of
from gateway.formats.scores import parse_rerank
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

SCORES = [0.1, 0.9, 0.5]
# The total alone in rerank's usage, as vLLM has it.
RANKED: Any = {
    "results": [{"index": at, "relevance_score": SCORES[at]} for at in (1, 2, 0)],
    "usage": {"total_tokens": 21},
}
SCORED: Any = {
    "data": [{"index": at, "object": "score", "score": score} for at, score in enumerate(SCORES)],
    "usage": {"prompt_tokens": 22, "total_tokens": 22},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture(autouse=True)
def answers(server: Server) -> None:
    server.answers |= {"/v1/rerank": RANKED, "/v1/score": SCORED}


@pytest.fixture(scope="module")
def ranking(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": "ranker", "upstream_model": "theirs"}
    declared = entry | {"capabilities": ["rerank", "score"]}
    path = tmp_path_factory.mktemp("ranking")
    settings = {"upstreams": json.dumps([declared])}
    with running_deployment(path, settings=settings, engines=None) as made:
        with made.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "ranker")
        made.services.prices.refresh()
        yield made


def ask(deployment: Deployment, path: str, **body: Any) -> httpx.Response:
    url = f"{deployment.url}{path}"
    asked = {"model": "ranker", **body}
    return httpx.post(url, json=asked, headers=deployment.headers, timeout=60)


def test_documents_are_ranked_by_the_upstream(ranking: Deployment, server: Server) -> None:
    answer = ask(ranking, "/v1/rerank", query="toll", documents=["a", "b", {"text": "c"}], top_n=2)
    assert answer.status_code == 200, answer.text
    assert [(each["index"], each["relevance_score"]) for each in answer.json()["results"]] == [
        (1, 0.9),
        (2, 0.5),
    ]
    sent = {"model": "theirs", "query": "toll", "documents": ["a", "b", "c"]}
    assert server.asked[-1] == ("/v1/rerank", sent)
    event = ranking.event(answer.headers["x-request-id"])
    assert (event["input_tokens"], event["output_tokens"], event["status"]) == (21, 0, 200)


@pytest.mark.parametrize("first", ["one", ["one"], ["one", "two", "three"]])
def test_pairs_are_scored_by_the_upstream(ranking: Deployment, server: Server, first: Any) -> None:
    answer = ask(ranking, "/v1/score", text_1=first, text_2=["a", "b", "c"])
    assert [each["score"] for each in answer.json()["data"]] == SCORES, answer.text
    sent = server.asked[-1][1]
    assert sent["text_1"] == (first if len(first) == 3 and first != "one" else "one")
    assert sent["text_2"] == ["a", "b", "c"]
    assert ranking.event(answer.headers["x-request-id"])["input_tokens"] == 22


def test_a_wrong_answer_is_the_upstreams_fault(ranking: Deployment, server: Server) -> None:
    server.answers["/v1/rerank"] = {"results": RANKED["results"][:2]}
    answer = ask(ranking, "/v1/rerank", query="toll", documents=["a", "b", "c"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    event = ranking.event(answer.headers["x-request-id"])
    assert (event["input_tokens"], event["output_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"results": [{"index": 0, "relevance_score": 0.5}]}',
        b'{"results": [{"index": 0, "relevance_score": 1e999}, {"index": 1, "relevance_score": 0}]}',
        b'{"results": [{"index": 0, "score": 1}, {"index": 2, "score": 1}]}',
        b'{"data": [{"index": 0}, {"index": 1}]}',
        b'{"data": "none"}',
        b"[]",
        b"{}",
    ],
)
def test_an_answer_without_a_score_for_each_document_is_refused(wrong: bytes) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", "b"]}
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        scores_of(wrong, parse_rerank(json.dumps(body).encode()))
