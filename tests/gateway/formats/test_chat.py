"""The chat route by OpenAI's own SDK: answers, streams, errors, and what reaches the books."""

import openai
import pytest
from openai import OpenAI

from tests.gateway.deployment import MODEL, Deployment, running_deployment

HELLO = [{"role": "user", "content": "Hello, who are you? Tell me of tolls and roads."}]


def test_an_answer_and_its_usage_event_agree(deployment: Deployment, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=12, user="alice"
    )
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    event = deployment.event(raw.headers["x-request-id"])
    assert event["input_tokens"] == answer.usage.prompt_tokens
    assert event["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens
    assert (event["output_tokens"], event["waived_tokens"]) == (12, 0)
    assert (event["end_user"], event["status"], event["settled_by"]) == ("alice", 200, "gateway")


def test_a_stream_gives_the_same_text_and_the_same_event(
    deployment: Deployment, client: OpenAI
) -> None:
    ask = {"model": MODEL, "messages": HELLO, "max_tokens": 20}
    whole = client.chat.completions.create(**ask)
    stream = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    streamed_id = stream.response.headers["x-request-id"]
    text, usage, reasons = "", None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert usage.completion_tokens == 20
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    one, two = deployment.event(whole._request_id), deployment.event(streamed_id)
    same = ("input_tokens", "output_tokens", "waived_tokens", "finish_reason", "model", "route")
    assert [one[name] for name in same] == [two[name] for name in same]
    assert two["cached_tokens"] == usage.prompt_tokens_details.cached_tokens > 0


def test_usage_is_told_only_where_it_was_asked_for(client: OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_several_choices_are_all_counted(deployment: Deployment, client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 15


def test_a_wrong_key_is_refused(deployment: Deployment) -> None:
    with (
        OpenAI(base_url=f"{deployment.url}/v1", api_key="th_wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.code == "invalid_api_key"


def test_an_unknown_model_is_named(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found" and "'gpt-9'" in str(caught.value)


def test_a_prompt_over_the_context_is_refused_with_the_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=600)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in str(caught.value) and "600" in str(caught.value)


def test_a_parameter_that_the_engine_lacks_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=HELLO, response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"frobnicate": True})
    assert caught.value.param == "frobnicate"


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_engine_parameters_pass_through(deployment: Deployment, client: OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=2,
        temperature=0,
        top_p=0.5,
        seed=7,
        logit_bias={"5": -100},
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True},
    )
    got = deployment.engine.submitted[-1].sampling
    assert (got.temperature, got.top_p, got.seed, got.top_k) == (0, 0.5, 7, 3)
    assert (got.min_p, got.repetition_penalty, got.ignore_eos) == (0.1, 1.5, True)
    assert got.logit_bias == {5: -100}


def test_without_moderation_the_answer_is_the_same(
    deployment: Deployment, client: OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    guarded = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, n=2)
    plain_settings = {"moderation": "off"}
    with (
        running_deployment(tmp_path_factory.mktemp("plain"), settings=plain_settings) as other,
        OpenAI(base_url=f"{other.url}/v1", api_key=other.key, max_retries=0) as plain,
    ):
        answer = plain.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, n=2)
    said = [choice.message.content for choice in answer.choices]
    assert said == [choice.message.content for choice in guarded.choices]


def test_a_fault_of_ours_is_a_500_that_is_billed_once_and_leaves_nothing_open(
    deployment: Deployment, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _fail(*_arguments: object) -> dict[str, object]:
        raise RuntimeError("a bug")

    monkeypatch.setattr("gateway.formats.chat.response.usage_object", _fail)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert "a bug" not in str(caught.value)
    assert deployment.last_event()["request_id"] in str(caught.value)
    assert deployment.services.spool.file.open_requests() == []
