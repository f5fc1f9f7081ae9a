"""What each provider's counts include, by a table kept by hand from the providers' pages."""

from typing import Any

import pytest

from gateway.engines.ports.anthropic.usage import split_of_usage as anthropic
from gateway.engines.ports.bedrock.usage import split_of_usage as bedrock
from gateway.engines.ports.cohere.usage import split_of_usage as cohere
from gateway.engines.ports.gemini.usage import split_of_usage as gemini
from gateway.engines.ports.responses.usage import split_of_usage as responses
from gateway.engines.ports.shaped.dialects import DIALECTS
from gateway.engines.ports.shaped.usage import split_of_usage as shaped
from gateway.engines.ports.split import Split

CACHED = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 60},
}
THOUGHT = {"completion_tokens_details": {"reasoning_tokens": 5}}

TABLE: list[tuple[str, Any, dict[str, Any], Split]] = [
    # Anthropic and Bedrock leave cached tokens out of the input.
    (
        "anthropic",
        anthropic,
        {
            "input_tokens": 10,
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 30,
            "output_tokens": 7,
        },
        Split(input=10, cache_read=60, cache_write=30, output=7),
    ),
    (
        "anthropic, by lifetime",
        anthropic,
        {
            "input_tokens": 10,
            "cache_creation_input_tokens": 30,
            "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 10},
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 3},
            "server_tool_use": {"web_search_requests": 2},
        },
        Split(input=10, cache_write=20, cache_write_long=10, output=7, reasoning=3, searches=2),
    ),
    (
        "bedrock",
        bedrock,
        {
            "inputTokens": 10,
            "cacheReadInputTokens": 60,
            "cacheWriteInputTokens": 30,
            "cacheDetails": [{"ttl": "1h", "inputTokens": 10}, {"ttl": "5m", "inputTokens": 20}],
            "outputTokens": 7,
        },
        Split(input=10, cache_read=60, cache_write=20, cache_write_long=10, output=7),
    ),
    # Gemini includes them, and counts thoughts and its tools' prompts beside.
    (
        "gemini",
        gemini,
        {
            "promptTokenCount": 100,
            "cachedContentTokenCount": 60,
            "candidatesTokenCount": 7,
            "thoughtsTokenCount": 5,
            "toolUsePromptTokenCount": 8,
            "promptTokensDetails": [
                {"modality": "TEXT", "tokenCount": 70},
                {"modality": "AUDIO", "tokenCount": 30},
            ],
        },
        Split(input=48, cache_read=60, output=12, reasoning=5, audio_input=30),
    ),
    # OpenAI includes them, and reasoning in the output.
    (
        "openai",
        lambda usage: shaped(usage, DIALECTS["openai"]),
        {**CACHED, **THOUGHT, "total_tokens": 120},
        Split(input=40, cache_read=60, output=20, reasoning=5),
    ),
    (
        "responses",
        responses,
        {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 5},
        },
        Split(input=30, cache_read=60, cache_write=10, output=20, reasoning=5),
    ),
    (
        "deepseek",
        lambda usage: shaped(usage, DIALECTS["deepseek"]),
        {"prompt_tokens": 100, "prompt_cache_hit_tokens": 60, "completion_tokens": 20},
        Split(input=40, cache_read=60, output=20),
    ),
    (
        "mistral",
        lambda usage: shaped(usage, DIALECTS["mistral"]),
        {"prompt_tokens": 100, "num_cached_tokens": 60, "completion_tokens": 20},
        Split(input=40, cache_read=60, output=20),
    ),
    # xAI counts reasoning beside the completion; the total tells, or its absence does.
    (
        "xai",
        lambda usage: shaped(usage, DIALECTS["xai"]),
        {**CACHED, **THOUGHT, "total_tokens": 125},
        Split(input=40, cache_read=60, output=25, reasoning=5),
    ),
    (
        "xai, once it includes it",
        lambda usage: shaped(usage, DIALECTS["xai"]),
        {**CACHED, **THOUGHT, "total_tokens": 120},
        Split(input=40, cache_read=60, output=20, reasoning=5),
    ),
    # Cohere bills other units than it counts.
    (
        "cohere",
        cohere,
        {
            "billed_units": {"input_tokens": 30.0, "output_tokens": 7.0, "search_units": 1},
            "tokens": {"input_tokens": 500, "output_tokens": 9},
        },
        Split(input=30, output=7, searches=1),
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_a_report_is_split_as_the_table_says(row: tuple[str, Any, dict[str, Any], Split]) -> None:
    _, split_of, usage, expected = row
    assert split_of(usage) == expected
    assert split_of(usage).as_openai()["prompt_tokens"] == expected.prompt


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("wrong", [-5, None, "7", 1.5, 2**40, [], True])
def test_a_count_that_is_none_is_zero(
    row: tuple[str, Any, dict[str, Any], Split], wrong: Any
) -> None:
    """Each number in turn: the split has no negative part and does not fail."""
    _, split_of, usage, _ = row
    for name in usage:
        split = split_of({**usage, name: wrong})
        assert min(split.input, split.cache_read, split.cache_write, split.output) >= 0
        assert split.reasoning <= split.output or "Details" in name
