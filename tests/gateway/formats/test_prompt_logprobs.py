"""Log-probabilities of prompts through the gateway, on the real engine, compared with `transformers`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.settings import Settings
from engine.demo.paths import MODEL_DIR
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.clients import make_engines
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.own_engine import deployment_on_own_engine, openai_client

TEXT = "A toll is a fee that is paid to use a road. Who pays the toll?"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("scored")
    with deployment_on_own_engine(folder, num_blocks=256) as running:
        yield running


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with openai_client(deployment) as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Of TEXT's tokens: [positions, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens_of(TEXT)])).logits[0]
    return logits.log_softmax(-1)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(MODEL_DIR)(text)["input_ids"]
    return ids


def likelihood(table: torch.Tensor) -> list[float]:
    ids = tokens_of(TEXT)
    return [table[n, token].item() for n, token in enumerate(ids[1:])]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_request_of_lm_eval(
    client: OpenAI, expected: torch.Tensor, as_ids: bool, max_tokens: int
) -> None:
    """Sum of the continuation's log-probabilities, and whether it is the greedy one."""
    ids = tokens_of(TEXT)
    prompt: Any = [ids, ids[:5]] if as_ids else [TEXT, "A toll"]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    found, other = answer.choices
    assert found.logprobs and other.logprobs and found.text.startswith(TEXT)
    given = found.logprobs.token_logprobs or []
    assert given[0] is None and len(given) == len(ids) + max_tokens
    assert given[1 : len(ids)] == pytest.approx(likelihood(expected), abs=1e-3)
    tops = found.logprobs.top_logprobs or []
    greedy = [max(each, key=each.__getitem__) for each in tops[1 : len(ids)]]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    best = [tokenizer.decode([n]) for n in expected.argmax(-1).tolist()]
    assert greedy == best[: len(greedy)]
    texts, offsets = found.logprobs.tokens or [], found.logprobs.text_offset or []
    placed = list(zip(offsets, texts, strict=True))
    assert all(found.text[at : at + len(text)] == text for at, text in placed if text in TEXT)
    assert answer.usage and answer.usage.completion_tokens == 2 * max_tokens
    assert answer.usage.prompt_tokens == len(ids) + len(other.logprobs.tokens or []) - max_tokens


def test_an_answer_without_tokens_is_metered(client: OpenAI, deployment: Deployment) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=TEXT, echo=True, logprobs=0, max_tokens=0, n=2
    )
    first, second = raw.parse().choices
    assert first.text == second.text == TEXT and first.logprobs == second.logprobs
    event = deployment.event(raw.headers["x-request-id"])
    counts = event["input_tokens"], event["cached_tokens"], event["output_tokens"]
    assert counts == (len(tokens_of(TEXT)), 0, 0)


def test_the_field_of_vllm(client: OpenAI, expected: torch.Tensor) -> None:
    ids = tokens_of(TEXT)
    answer = client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    listed = answer.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert listed[0] is None and len(listed) == len(ids) and answer.choices[0].logprobs is None
    for position, (token, entry) in enumerate(zip(ids[1:], listed[1:], strict=True)):
        row = expected[position]
        assert entry[str(token)]["logprob"] == pytest.approx(row[token].item(), abs=1e-3)
        best = row.topk(2)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for rank, (one, value) in enumerate(pairs, 1):
            assert entry[str(one)]["rank"] == rank
            assert entry[str(one)]["logprob"] == pytest.approx(value, abs=1e-3)
        assert len(entry) in (2, 3)


def test_a_chat_has_it_beside_its_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=2,
        extra_body={"prompt_logprobs": 0},
    )
    listed = answer.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert answer.usage and len(listed) == answer.usage.prompt_tokens
    assert all(len(each) == 1 for each in listed[1:])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(
    deployment: Deployment, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "prompt": "Hi", **fields}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=body, headers=deployment.headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_an_upstream_is_not_asked_for_them(tmp_path: Path) -> None:
    text = json.dumps([{"url": "http://127.0.0.1:9", "name": "v", "model": "theirs"}])
    engines = make_engines(
        Settings(data_dir=tmp_path), read_upstreams(text), lambda _r: None, lambda _n, _e: None
    )
    with running_deployment(tmp_path, settings={"upstreams": text}, engines=engines) as running:
        with running.services.database.transaction() as session:
            ensure_default_prices(session, SystemClock(), "theirs")
        with OpenAI(base_url=f"{running.url}/v1", api_key=running.key, max_retries=0) as client:
            for more, param in (
                ({"echo": True, "logprobs": 1}, "echo"),
                ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ):
                with pytest.raises(openai.BadRequestError) as caught:
                    client.completions.create(model="theirs", prompt="Hi", extra_body=more)
                assert caught.value.code == "unsupported_parameter"
                assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_tokens_by_id(client: OpenAI, stream: bool) -> None:
    codec = AutoTokenizer.from_pretrained(MODEL_DIR)
    more = {"return_tokens_as_token_ids": True}
    plain, named = [
        client.completions.create(
            model=MODEL,
            prompt=TEXT,
            echo=True,
            logprobs=2,
            max_tokens=4,
            temperature=0,
            extra_body=given,
        ).choices[0]
        for given in ({}, more)
    ]
    assert plain.text == named.text and plain.logprobs and named.logprobs
    ids = [int(each.removeprefix("token_id:")) for each in named.logprobs.tokens or ()]
    assert codec.decode(ids, skip_special_tokens=True) == named.text
    assert ids[: len(tokens_of(TEXT))] == tokens_of(TEXT)
    assert named.logprobs.text_offset == plain.logprobs.text_offset
    assert named.logprobs.token_logprobs == plain.logprobs.token_logprobs
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "stream": stream}
    answer = client.chat.completions.create(**asked, extra_body=more)
    choices = [each.choices[0] for each in (answer if stream else [answer])]
    said = "".join((c.delta if stream else c.message).content or "" for c in choices)
    listed = [one for c in choices if c.logprobs for one in c.logprobs.content]
    assert codec.decode([_id(one.token) for one in listed], skip_special_tokens=True) == said
    assert all(_id(one.top_logprobs[0].token) == _id(one.token) for one in listed)


def _id(name: str) -> int:
    assert name.startswith("token_id:")
    return int(name.removeprefix("token_id:"))


@pytest.mark.parametrize("chosen", [None, 42, 700])
def test_log_probabilities_of_ids_that_the_client_names(
    client: OpenAI, expected: torch.Tensor, chosen: int | None
) -> None:
    """As the model gives them for the token after TEXT, whatever is sampled."""
    named, table = [700, 3, 1999], expected[-1]
    more = {"logprob_token_ids": named, "return_tokens_as_token_ids": True}
    allowed = {} if chosen is None else {"logit_bias": {str(chosen): 100}}
    answer = client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=1, logprobs=5, temperature=0, extra_body=more | allowed
    )
    found = answer.choices[0].logprobs
    assert found and found.tokens and found.top_logprobs
    sampled = int(table.argmax()) if chosen is None else chosen
    assert found.tokens == [f"token_id:{sampled}"]
    given = {int(name.removeprefix("token_id:")): p for name, p in found.top_logprobs[0].items()}
    assert given.keys() == {*named, sampled}
    logits = table.clone()
    if chosen is not None:
        logits[chosen] += 100
    scores = logits.log_softmax(-1)
    assert given == pytest.approx({n: scores[n].item() for n in given}, abs=1e-3)


def test_what_is_excluded_has_the_least_log_probability_and_not_null(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=1, logprobs=2, extra_body={"allowed_token_ids": [42]}
    )
    found = answer.choices[0].logprobs
    assert found and found.top_logprobs
    assert sorted(found.top_logprobs[0].values())[0] == -9999.0
    assert max(found.top_logprobs[0].values()) == pytest.approx(0.0, abs=1e-6)
