"""/v1/embeddings, /v1/rerank and /v1/score on the built-in engine, compared with `transformers`."""

import base64
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo.paths import MODEL_DIR
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.own_engine import deployment_on_own_engine

TEXTS = [
    "A toll is a fee that is paid to use a road.",
    "Who pays the toll?",
    "The invoice of May has three lines.",
]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("pooled")
    with deployment_on_own_engine(folder, num_blocks=256) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(own: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{own.url}/v1", api_key=own.key, max_retries=2, timeout=60) as one:
        one.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        yield one


@pytest.fixture(scope="module")
def oracle() -> "Oracle":
    return Oracle()


class Oracle:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def states(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = self.model(torch.tensor([ids]), output_hidden_states=True)
        return output.hidden_states[-1][0]

    def unit(self, text: str) -> np.ndarray:
        last = self.states(self.ids(text))[-1]
        return np.asarray((last / last.norm()).numpy())


def test_the_sdk_gets_the_normalised_state_of_the_last_token(
    sdk: OpenAI, own: Deployment, oracle: Oracle
) -> None:
    answer = sdk.embeddings.create(model=MODEL, input=TEXTS, user="ada")
    assert [row.index for row in answer.data] == [0, 1, 2]
    for row, text in zip(answer.data, TEXTS, strict=True):
        np.testing.assert_allclose(row.embedding, oracle.unit(text), atol=1e-4)
    tokens = sum(len(oracle.ids(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    (event,) = own.events(1, end_user="ada")
    assert (event["kind"], event["route"]) == ("embedding", "/v1/embeddings")
    assert (event["input_tokens"], event["output_tokens"]) == (tokens, 0)
    assert event["counted_by"] == "engine" and event["status"] == 200


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pooling_dimensions_and_normalisation(sdk: OpenAI, oracle: Oracle, pooling: str) -> None:
    states = oracle.states(oracle.ids(TEXTS[0]))
    pooled = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling].numpy()
    for dimensions, normalize in ((None, False), (32, False), (32, True)):
        answer = sdk.embeddings.create(
            model=MODEL,
            input=TEXTS[0],
            dimensions=dimensions or openai.NOT_GIVEN,
            extra_body={"pooling": pooling, "normalize": normalize},
        )
        wanted = pooled[:dimensions]
        wanted = wanted / np.linalg.norm(wanted) if normalize else wanted
        np.testing.assert_allclose(answer.data[0].embedding, wanted, atol=2e-4)


def test_both_encodings_hold_the_same_numbers(own: Deployment, oracle: Oracle) -> None:
    found = {}
    for form in ("float", "base64"):
        body = {"model": MODEL, "input": TEXTS[1], "encoding_format": form}
        answer = httpx.post(f"{own.url}/v1/embeddings", json=body, headers=own.headers).json()
        found[form] = answer["data"][0]["embedding"]
    packed = np.frombuffer(base64.b64decode(found["base64"]), "<f4")
    assert packed.tolist() == found["float"]
    assert math.isclose(float(np.linalg.norm(packed)), 1.0, abs_tol=1e-5)


def test_token_ids_are_embedded_like_their_text(sdk: OpenAI, oracle: Oracle) -> None:
    ids = [oracle.ids(text) for text in TEXTS[:2]]
    answer = sdk.embeddings.create(model=MODEL, input=ids)
    for row, text in zip(answer.data, TEXTS, strict=False):
        np.testing.assert_allclose(row.embedding, oracle.unit(text), atol=1e-4)


def test_more_texts_than_the_engine_takes_at_once(
    sdk: OpenAI, own: Deployment, oracle: Oracle
) -> None:
    texts = [f"{n} cars pass the gate" for n in range(150)]
    answer = sdk.embeddings.create(model=MODEL, input=texts)
    assert [row.index for row in answer.data] == list(range(150))
    for number in (0, 63, 64, 149):
        wanted = oracle.unit(texts[number])
        np.testing.assert_allclose(answer.data[number].embedding, wanted, atol=1e-4)
    assert answer.usage.prompt_tokens == sum(len(oracle.ids(text)) for text in texts)


def test_truncation_keeps_the_first_tokens(sdk: OpenAI, oracle: Oracle) -> None:
    long = " ".join(TEXTS * 60)
    assert len(oracle.ids(long)) > 1024
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has \d+ tokens; the model takes"):
        sdk.embeddings.create(model=MODEL, input=["short", long])
    for given, kept in ((5, 5), (-1, 1024)):
        answer = sdk.embeddings.create(
            model=MODEL, input=long, extra_body={"truncate_prompt_tokens": given}
        )
        assert answer.usage.prompt_tokens == kept
        ids = oracle.tokenizer(long, truncation=True, max_length=kept)["input_ids"]
        last = oracle.states(list(ids))[-1]
        np.testing.assert_allclose(answer.data[0].embedding, last / last.norm(), atol=2e-4)


def test_rerank_orders_documents_by_their_cosine(own: Deployment, oracle: Oracle) -> None:
    body: dict[str, Any] = {"model": MODEL, "query": "What is a toll?", "documents": TEXTS}
    response = httpx.post(f"{own.url}/v1/rerank", json=body, headers=own.headers)
    answer = response.json()
    query = oracle.unit(body["query"])
    cosines = [float(query @ oracle.unit(text)) for text in TEXTS]
    order = sorted(range(3), key=lambda n: -cosines[n])
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[n] for n in order]
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == pytest.approx([cosines[n] for n in order], abs=1e-4)
    tokens = sum(len(oracle.ids(text)) for text in [body["query"], *TEXTS])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    event = own.event(response.headers["x-request-id"])
    assert (event["route"], event["input_tokens"]) == ("/v1/rerank", tokens)
    given = [{"text": text} for text in TEXTS]
    body |= {"documents": given, "top_n": 1, "return_documents": False}
    answer = httpx.post(f"{own.url}/v1/rerank", json=body, headers=own.headers).json()
    (best,) = answer["results"]
    assert best["index"] == order[0] and "document" not in best


@pytest.mark.parametrize(("first", "pairs"), [(TEXTS[0], "one"), (TEXTS, "each")])
def test_scores_are_cosines(own: Deployment, oracle: Oracle, first: Any, pairs: str) -> None:
    second = TEXTS[::-1]
    body = {"model": MODEL, "text_1": first, "text_2": second}
    answer = httpx.post(f"{own.url}/v1/score", json=body, headers=own.headers).json()
    left = [first] * 3 if pairs == "one" else first
    wanted = [float(oracle.unit(a) @ oracle.unit(b)) for a, b in zip(left, second, strict=True)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-4)
    assert answer["object"] == "list" and answer["data"][0]["object"] == "score"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("embeddings", {"input": "x", "dimensions": 4096}, "dimensions"),
        ("embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("embeddings", {"input": [[1, 10**6]]}, "input"),
        ("embeddings", {"input": "x", "pooling": "max"}, "pooling"),
        ("rerank", {"query": "x", "documents": []}, "documents"),
        ("rerank", {"query": "x", "documents": ["a"] * 2048}, "documents"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("score", {"text_1": "", "text_2": "c"}, "text_1"),
    ],
)
def test_what_cannot_be_done_is_refused(
    own: Deployment, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, **fields}
    answer = httpx.post(f"{own.url}/v1/{path}", json=body, headers=own.headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
