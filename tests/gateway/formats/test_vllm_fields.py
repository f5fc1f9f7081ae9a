"""Fields of vLLM's API beyond OpenAI's, read with the SDK and with the model's own tokenizer."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from engine.demo.paths import MODEL_DIR
from gateway.answers import reasoning
from gateway.catalog.codec.tokenizing import load_codec
from tests.gateway.deployment import MODEL, Deployment

ASK: Any = [{"role": "user", "content": "Who pays the toll?"}]
SAID = "Lorry drivers 🚚 pay."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture
def says(deployment: Deployment, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The model answers with SAID, and ends."""
    end = tokenizer.token_to_id("<|im_end|>")
    deployment.engine.script = [*tokenizer.encode(SAID, add_special_tokens=False).ids, end]
    yield deployment.engine.script
    deployment.engine.script = None


def post(deployment: Deployment, path: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **fields}
    return httpx.post(f"{deployment.url}{path}", json=body, headers=deployment.headers, timeout=60)


def test_batched_chats_are_refused_as_a_route_and_not_as_a_stored_completion(
    deployment: Deployment,
) -> None:
    answer = post(deployment, "/v1/chat/completions/batch", messages=[ASK])
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unsupported_endpoint" and "chat/completions/batch" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_null_for_a_prompt_is_named(deployment: Deployment, path: str) -> None:
    name = "prompt" if path == "/v1/completions" else "input"
    error = post(deployment, path, **{name: None}).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is null; it must be a string or a list.")


def test_a_prompt_of_ids_is_echoed_with_its_control_tokens(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) < len(text) // 3  # the marks are tokens
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith(text)


@pytest.fixture
def thinks(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reasoning, "_tags_of", lambda _codec: ("<think>", "</think>"))
    deployment.engine.script = load_codec(MODEL_DIR).encode("<think>\nRain?\n</think>\n\nFair.")
    yield
    deployment.engine.script = None


def both(client: OpenAI, **fields: Any) -> list[dict[str, str | None]]:
    """A message's texts by field: of a whole answer, and of a stream."""
    whole = client.chat.completions.create(model=MODEL, messages=ASK, **fields).choices[0].message
    stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **fields)
    deltas = [chunk.choices[0].delta for chunk in stream]
    found = []
    for parts in ([whole], deltas):
        texts = {}
        for name in ("reasoning", "reasoning_content", "content"):
            texts[name] = "".join(getattr(part, name, None) or "" for part in parts)
        found.append(texts)
    return found


@pytest.mark.usefixtures("thinks")
def test_reasoning_has_both_names(client: OpenAI) -> None:
    expected = {"reasoning": "Rain?", "reasoning_content": "Rain?", "content": "Fair."}
    assert both(client) == [expected, expected]
    assert both(client, extra_body={"include_reasoning": True}) == [expected, expected]


@pytest.mark.usefixtures("thinks")
def test_reasoning_is_left_out_on_request_and_still_counted(
    client: OpenAI, deployment: Deployment
) -> None:
    expected = {"reasoning": "", "reasoning_content": "", "content": "Fair."}
    assert both(client, extra_body={"include_reasoning": False}) == [expected, expected]
    assert deployment.engine.script is not None
    assert deployment.last_event()["output_tokens"] == len(deployment.engine.script)


@pytest.mark.parametrize("logprobs", [None, True])
def test_token_ids_of_a_chat(
    client: OpenAI, says: list[int], tokenizer: Tokenizer, logprobs: bool | None
) -> None:
    wanted: Any = {"model": MODEL, "messages": ASK, "extra_body": {"return_token_ids": True}}
    if logprobs:
        wanted["logprobs"] = True
    answer: Any = client.chat.completions.create(**wanted)
    prompt = tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nWho pays the toll?<|im_end|>\n<|im_start|>assistant\n"
    assert answer.choices[0].token_ids == says
    assert (answer.choices[0].logprobs is None) is (logprobs is None)
    chunks: list[Any] = list(client.chat.completions.create(**wanted, stream=True))
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert not any("prompt_token_ids" in each.model_dump() for each in chunks[1:])
    assert [n for each in chunks for n in each.choices[0].token_ids] == says
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == SAID
    plain: Any = client.chat.completions.create(model=MODEL, messages=ASK)
    assert plain.prompt_token_ids is None and plain.choices[0].token_ids is None


def test_token_ids_of_completions(client: OpenAI, says: list[int], tokenizer: Tokenizer) -> None:
    texts = ["A toll is a fee", "Roads"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    wanted: Any = {"model": MODEL, "prompt": texts, "n": 2, "max_tokens": 40}
    wanted["extra_body"] = {"return_token_ids": True}
    answer: Any = client.completions.create(**wanted)
    assert [each.prompt_token_ids for each in answer.choices] == [ids[0], ids[0], ids[1], ids[1]]
    assert [each.token_ids for each in answer.choices] == [says] * 4
    prompts: dict[int, list[Any]] = {}
    made: dict[int, list[int]] = {}
    chunk: Any
    for chunk in client.completions.create(**wanted, stream=True):
        choice = chunk.choices[0]
        if "prompt_token_ids" in choice.model_dump():
            prompts.setdefault(choice.index, []).append(choice.prompt_token_ids)
        made[choice.index] = made.get(choice.index, []) + choice.token_ids
    assert prompts == {0: [ids[0]], 1: [ids[0]], 2: [ids[1]], 3: [ids[1]]}
    assert made == dict.fromkeys(range(4), says)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_the_assistants_words_are_echoed(
    deployment: Deployment, says: list[int], stream: bool, parts: bool
) -> None:
    begun = "An apple a day "
    content = [{"type": "text", "text": begun}] if parts else begun
    messages = [*ASK, {"role": "assistant", "content": content}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    texts = {}
    for echo in (False, True):
        answer = post(deployment, "/v1/chat/completions", stream=stream, echo=echo, **fields)
        assert answer.status_code == 200, answer.text
        if stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            texts[echo] = "".join(each.get("content") or "" for each in deltas)
        else:
            texts[echo] = answer.json()["choices"][0]["message"]["content"]
    assert texts == {False: SAID, True: begun + SAID}
    user = post(deployment, "/v1/chat/completions", messages=ASK, echo=True)
    assert user.json()["choices"][0]["message"]["content"] == SAID


@pytest.mark.parametrize(
    ("path", "fields", "says_of"),
    [
        ("/v1/chat/completions", {"messages": ASK}, "needs logprobs"),
        ("/v1/completions", {"prompt": "a"}, "needs logprobs"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}, "needs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "use_beam_search": True}, "beam search"),
    ],
)
def test_log_probabilities_by_id_need_generated_tokens(
    deployment: Deployment, path: str, fields: Any, says_of: str
) -> None:
    answer = post(deployment, path, logprob_token_ids=[5], **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "logprob_token_ids" and says_of in error["message"]


def test_a_field_that_nobody_knows_stays_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASK, extra_body={"return_token_idz": True}
        )
    assert caught.value.param == "return_token_idz"


def test_models_have_the_names_that_vllm_gives_their_fields(client: OpenAI) -> None:
    (model,) = client.models.list().data
    told = model.model_dump()
    assert (told["root"], told["parent"], told["max_model_len"]) == (MODEL, None, 512)


def test_all_keys_of_logit_bias_that_are_no_ids_are_named(deployment: Deployment) -> None:
    bias = {"5": 1, "one": 1, "two": 1}
    error = post(deployment, "/v1/completions", prompt="a", logit_bias=bias).json()["error"]
    assert error["param"] == "logit_bias"
    assert error["message"].startswith("logit_bias has 'one', 'two', which are not token ids.")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a", "store": False}),
    ],
)
def test_the_clients_own_id_is_kept_from_the_body_too(
    deployment: Deployment, path: str, fields: Any
) -> None:
    answer = post(deployment, path, request_id="run 7", **fields)
    assert answer.status_code == 200, answer.text
    event = deployment.event(answer.headers["x-request-id"])
    assert event["client_request_id"] == "run 7"
    longer = post(deployment, path, request_id="x" * 2_000, **fields)
    assert longer.status_code == 400 and longer.json()["error"]["param"] == "request_id"
