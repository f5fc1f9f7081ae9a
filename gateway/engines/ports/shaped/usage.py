"""What `usage` of OpenAI's form includes.

| field | of the canonical split |
|---|---|
| prompt_tokens | all input: what was read from a cache or written into one is a part of it |
| prompt_tokens_details.cached_tokens, or the dialect's own field | `cache_read` |
| prompt_tokens_details.cache_write_tokens | `cache_write` |
| completion_tokens | `output`, with reasoning, unless the dialect counts it separately |
| completion_tokens_details.reasoning_tokens | `reasoning` |
| *_details.audio_tokens, image_tokens | audio and image parts of the two |
| server_tool_use.web_search_requests, num_sources_used | `searches` |

The total, where there is one, shows whether reasoning is counted separately.
"""

from typing import Any

from gateway.engines.ports.shaped.dialects import Dialect
from gateway.engines.ports.split import Split, count, split_of


def split_of_usage(usage: dict[str, Any], dialect: Dialect) -> Split:
    given, made = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    prompt, output = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    reasoning = count(made, "reasoning_tokens") or count(usage, "reasoning_tokens")
    total = count(usage, "total_tokens")
    beside = dialect.beside
    if total and reasoning:
        beside = total == prompt + output + reasoning
    output += reasoning if beside else 0
    return split_of(
        prompt,
        read=count(given, "cached_tokens") or count(usage, *dialect.read),
        written=count(given, "cache_write_tokens"),
        output=output,
        reasoning=min(reasoning, output),
        audio_input=count(given, "audio_tokens"),
        image_input=count(given, "image_tokens"),
        audio_output=count(made, "audio_tokens"),
        image_output=count(made, "image_tokens"),
        searches=count(usage.get("server_tool_use"), "web_search_requests")
        or count(usage, "num_sources_used"),
    )
