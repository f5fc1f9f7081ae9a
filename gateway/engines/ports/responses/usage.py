"""What `usage` of a response includes.

| field | of the canonical split |
|---|---|
| input_tokens | all input: what was read from the cache or written into it is a part of it |
| input_tokens_details.cached_tokens | `cache_read` |
| input_tokens_details.cache_write_tokens | `cache_write` |
| output_tokens | `output`, with reasoning |
| output_tokens_details.reasoning_tokens | `reasoning` |

Searches and calls of other tools are counted by their items of the output.
"""

from typing import Any

from gateway.engines.ports.split import Split, count, split_of


def split_of_usage(usage: dict[str, Any], searches: int = 0, tool_calls: int = 0) -> Split:
    given, made = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    output = count(usage, "output_tokens")
    return split_of(
        count(usage, "input_tokens"),
        read=count(given, "cached_tokens"),
        written=count(given, "cache_write_tokens"),
        output=output,
        reasoning=min(output, count(made, "reasoning_tokens")),
        audio_input=count(given, "audio_tokens"),
        image_input=count(given, "image_tokens"),
        searches=searches,
        tool_calls=tool_calls,
    )
