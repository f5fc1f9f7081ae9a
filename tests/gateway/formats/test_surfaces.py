"""The other surfaces, by the SDKs that people have: the same work, the same counts, other shapes."""

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from openai import OpenAI

from tests.gateway.deployment import MODEL, Deployment

HELLO = [{"role": "user", "content": "Hello, who are you? Tell me of tolls and roads."}]


@pytest.fixture
def claude(deployment: Deployment) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=deployment.url, api_key=deployment.key, max_retries=0, timeout=60
    ) as made:
        yield made


def test_completions_answer_a_text_and_echo_it(client: OpenAI, deployment: Deployment) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a toll", max_tokens=7)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 7
    assert deployment.last_event()["route"] == "/v1/completions"
    echoed = client.completions.create(
        model=MODEL, prompt="Once upon a toll", max_tokens=7, echo=True
    )
    assert echoed.choices[0].text == "Once upon a toll" + answer.choices[0].text
    parts = client.completions.create(
        model=MODEL, prompt="Once upon a toll", max_tokens=7, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_completions_take_token_ids(client: OpenAI, deployment: Deployment) -> None:
    ids = httpx.post(
        f"{deployment.url}/tokenize",
        json={"model": MODEL, "prompt": "A toll"},
        headers=deployment.headers,
    ).json()["tokens"]
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=len(ids))
    assert answer.choices[0].text == "A toll"  # the fake engine repeats its prompt
    back = httpx.post(
        f"{deployment.url}/detokenize",
        json={"model": MODEL, "tokens": ids},
        headers=deployment.headers,
    )
    assert back.json() == {"prompt": "A toll"}


def test_messages_answer_in_anthropic_shape(claude: Anthropic, deployment: Deployment) -> None:
    first = claude.messages.create(model=MODEL, max_tokens=9, system="Be kind.", messages=HELLO)
    again = claude.messages.create(model=MODEL, max_tokens=9, system="Be kind.", messages=HELLO)
    assert first.stop_reason == "max_tokens" and first.content[0].text
    assert first.usage.output_tokens == 9 and first.usage.cache_read_input_tokens == 0
    cached = again.usage.cache_read_input_tokens
    assert cached and cached % 16 == 0
    assert again.usage.input_tokens + cached == first.usage.input_tokens
    event = deployment.last_event()
    assert event["input_tokens"] == first.usage.input_tokens
    counted = claude.messages.count_tokens(model=MODEL, system="Be kind.", messages=HELLO)
    assert counted.input_tokens == first.usage.input_tokens


def test_messages_stream_their_events(claude: Anthropic) -> None:
    whole = claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    with claude.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == 9 and final.stop_reason == "max_tokens"
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_messages_name_the_stop_sequence_that_ended_them(claude: Anthropic) -> None:
    whole = claude.messages.create(model=MODEL, max_tokens=30, messages=HELLO)
    text = whole.content[0].text
    stop = text[8:14]
    cut = claude.messages.create(model=MODEL, max_tokens=30, messages=HELLO, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    assert 0 < cut.usage.output_tokens < 30


def test_messages_errors_are_anthropics(deployment: Deployment, claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude-9", max_tokens=5, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"
    stranger = Anthropic(base_url=deployment.url, api_key="nonsense", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    raw = claude.messages.with_raw_response.create(model=MODEL, max_tokens=2, messages=HELLO)
    assert int(raw.headers["anthropic-ratelimit-requests-limit"]) > 0


def test_models_are_listed_in_the_shape_of_who_asks(claude: Anthropic, client: OpenAI) -> None:
    page = claude.models.list()
    assert [each.id for each in page.data] == [each.id for each in client.models.list()]
    assert page.first_id and page.has_more is False and page.data[0].type == "model"
    one = claude.models.retrieve(MODEL)
    assert one.display_name == MODEL and one.created_at.tzinfo is not None
    assert client.models.retrieve(MODEL).object == "model"


def test_responses_answer_and_stream(client: OpenAI) -> None:
    whole = client.responses.create(
        model=MODEL, instructions="Be kind.", input="Hello there", max_output_tokens=8
    )
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 8
    counted = client.responses.input_tokens.count(
        model=MODEL, instructions="Be kind.", input="Hello there"
    )
    assert counted.input_tokens == whole.usage.input_tokens
    kinds, text = [], ""
    for event in client.responses.create(
        model=MODEL,
        instructions="Be kind.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello there"}]}],
        max_output_tokens=8,
        stream=True,
    ):
        kinds.append(event.type)
        assert event.sequence_number == len(kinds) - 1
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"


def _spoken(logprobs: list[Any]) -> str:
    """Of all tokens, without those that a template writes."""
    return re.sub(r"<\|\w+\|>", "", "".join(each.token for each in logprobs))


def test_chats_and_completions_tell_how_likely_each_token_was(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello there"}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    told = chat.choices[0].logprobs.content
    assert _spoken(told) == chat.choices[0].message.content
    assert len(told) == 6 and all(len(each.top_logprobs) == 2 for each in told)
    assert all(each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob for each in told)
    done = client.completions.create(model=MODEL, prompt="Hello there", max_tokens=6, logprobs=2)
    older = done.choices[0].logprobs
    assert "".join(older.tokens) == done.choices[0].text and len(older.token_logprobs) == 6
    assert older.text_offset[1] == len(older.tokens[0])


def test_responses_tell_how_likely_each_token_was(client: OpenAI) -> None:
    asked = {
        "model": MODEL,
        "input": "Hello there",
        "max_output_tokens": 6,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**asked)
    told = whole.output[0].content[0].logprobs
    assert _spoken(told) == whole.output_text
    assert len(told) == 6 and all(len(each.top_logprobs) == 2 for each in told)
    came, done = [], []
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            came += event.logprobs
        elif event.type == "response.output_text.done":
            done = event.logprobs
    assert [each.token for each in came] == [each.token for each in told]
    assert [each.logprob for each in done] == [each.logprob for each in came]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", include=["file_search_call.results"])
    assert caught.value.param == "include"


def test_what_a_surface_lacks_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", max_tool_calls=2)
    assert caught.value.param == "max_tool_calls"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model=MODEL, input="x", conversation="conv_1")
    assert "conv_1" in unknown.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model=MODEL, input="x")
    assert missing.value.code == "embeddings_not_supported"


def test_langchain_is_served(deployment: Deployment) -> None:
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{deployment.url}/v1",
        api_key=deployment.key,
        max_tokens=6,
        max_retries=0,
    )
    answer = chat.invoke("Hello")
    assert answer.content and answer.usage_metadata["output_tokens"] == 6
    assert "".join(part.content for part in chat.stream("Hello")) == answer.content


def test_a_prompt_of_token_ids_is_screened_as_what_it_says(
    client: OpenAI, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    screener = deployment.services.screener
    assert screener is not None
    seen: list[str] = []
    plain = screener.prepare

    def _prepare(texts: Any, *rest: Any) -> Any:
        seen.extend(each.text for each in texts)
        return plain(texts, *rest)

    monkeypatch.setattr(screener, "prepare", _prepare)
    body = {"model": MODEL, "prompt": "A toll for all"}
    ids = httpx.post(f"{deployment.url}/tokenize", json=body, headers=deployment.headers).json()[
        "tokens"
    ]
    client.completions.create(model=MODEL, prompt=ids, max_tokens=2)
    assert seen == ["A toll for all"]
