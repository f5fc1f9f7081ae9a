"""Reasoning on each API, as the SDKs read it: whole, streamed, sent back, and counted."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from engine.demo.paths import MODEL_DIR
from gateway.answers import reasoning
from gateway.catalog.codec.tokenizing import load_codec
from tests.gateway.deployment import MODEL, Deployment

ASK: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def thinks(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The model's template has tags for reasoning. Gives the tokens of the answer."""
    monkeypatch.setattr(reasoning, "_tags_of", lambda _codec: ("<think>", "</think>"))
    codec = load_codec(MODEL_DIR)
    deployment.engine.script = codec.encode("<think>\nIt may rain.\n</think>\n\nFair.")
    yield len(deployment.engine.script)
    deployment.engine.script = None


def test_chat(client: OpenAI, deployment: Deployment, thinks: int) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("It may rain.", "Fair.")  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.completion_tokens == thinks
    details = answer.usage.completion_tokens_details
    assert details is not None and 0 < (details.reasoning_tokens or 0) < thinks
    assert deployment.last_event()["output_tokens"] == thinks
    said = {"reasoning_content": "", "content": ""}
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, stream=True):
        for name in said:
            said[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert said == {"reasoning_content": "It may rain.", "content": "Fair."}
    back = [*ASK, message.model_dump(exclude_none=True), *ASK]
    again = client.chat.completions.create(model=MODEL, messages=back)
    plain = [*ASK, {"role": "assistant", "content": "Fair."}, *ASK]
    without = client.chat.completions.create(model=MODEL, messages=plain)
    assert again.usage is not None and without.usage is not None
    assert again.usage.prompt_tokens == without.usage.prompt_tokens


def test_messages(deployment: Deployment, thinks: int) -> None:
    with Anthropic(base_url=deployment.url, api_key=deployment.key, max_retries=0) as claude:
        asked: Any = {"model": MODEL, "max_tokens": 99, "messages": ASK}
        answer = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for each in (answer, streamed):
            thought, text = each.content
            assert thought.type == "thinking" and thought.thinking == "It may rain."
            assert text.type == "text" and text.text == "Fair."
            assert each.usage.output_tokens == thinks
        back = [*ASK, {"role": "assistant", "content": [b.model_dump() for b in answer.content]}]
        again = claude.messages.create(**asked | {"messages": [*back, *ASK]})
        assert again.content[1].type == "text"


def test_responses(client: OpenAI, thinks: int) -> None:
    answer = client.responses.create(model=MODEL, input="How is the weather?")
    assert answer.output_text == "Fair."
    thought: Any = answer.output[0]
    assert thought.type == "reasoning" and thought.content[0].text == "It may rain."
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < thinks


def test_without_tags_in_the_template_nothing_is_taken_away(
    client: OpenAI, deployment: Deployment
) -> None:
    deployment.engine.script = load_codec(MODEL_DIR).encode("<think>Hm.</think>Fair.")
    try:
        answer = client.chat.completions.create(model=MODEL, messages=ASK).choices[0].message
    finally:
        deployment.engine.script = None
    assert answer.content == "<think>Hm.</think>Fair."
