"""Values at the ends of OpenAI's ranges, on the built-in engine."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.gateway.deployment import MODEL
from tests.gateway.own_engine import deployment_on_own_engine, openai_client

ASK: Any = [{"role": "user", "content": "What is a toll?"}]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    path = tmp_path_factory.mktemp("extremes")
    with deployment_on_own_engine(path, num_blocks=512) as made, openai_client(made) as client:
        yield client


def test_a_chat_has_128_choices(own: OpenAI) -> None:
    """More than the engine has places in a batch."""
    answer = own.chat.completions.create(model=MODEL, messages=ASK, n=128, max_tokens=2)
    assert [each.index for each in answer.choices] == list(range(128))
    assert answer.usage is not None and answer.usage.completion_tokens == 256
    streamed = {
        each.choices[0].index: each.choices[0].finish_reason
        for each in own.chat.completions.create(
            model=MODEL, messages=ASK, n=128, max_tokens=2, stream=True
        )
        if each.choices and each.choices[0].finish_reason
    }
    assert streamed == dict.fromkeys(range(128), "length")


def test_top_p_of_0_is_the_likeliest_token(own: OpenAI) -> None:
    def said(**sampling: Any) -> str | None:
        answer = own.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=16, seed=1, **sampling
        )
        return answer.choices[0].message.content

    assert said(top_p=0, temperature=2) == said(temperature=0)
    whole = own.responses.create(
        model=MODEL, input="What is a toll?", top_p=0, max_output_tokens=16
    )
    assert whole.output_text == said(temperature=0)


def test_a_prediction_changes_no_answer(own: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 40, "temperature": 0}
    plain = own.chat.completions.create(**asked)
    text = plain.choices[0].message.content or ""
    for content in (text, f"Not {text}", ""):
        answer = own.chat.completions.create(
            **asked, prediction={"type": "content", "content": content}
        )
        assert answer.choices[0].message.content == text
        assert answer.usage is not None and plain.usage is not None
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        told = answer.usage.completion_tokens_details
        assert told is not None and (told.accepted_prediction_tokens or 0) <= 40


def test_a_refusal_names_the_field_of_its_route(own: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        own.responses.create(model=MODEL, input="toll " * 2_000)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(BadRequestError) as caught:
        own.responses.create(model=MODEL, input="toll", max_output_tokens=2_000)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(BadRequestError) as caught:
        own.chat.completions.create(
            model=MODEL, messages=ASK, n=20, extra_body={"use_beam_search": True}
        )
    assert caught.value.param == "n"
