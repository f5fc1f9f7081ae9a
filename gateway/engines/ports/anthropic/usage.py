"""What Anthropic's `usage` includes.

| field | of the canonical split |
|---|---|
| input_tokens | `input`: it excludes what the cache gave and took |
| cache_read_input_tokens | `cache_read` |
| cache_creation.ephemeral_5m_input_tokens | `cache_write` |
| cache_creation.ephemeral_1h_input_tokens | `cache_write_long` |
| cache_creation_input_tokens | the sum of the two; `cache_write` where they are not given |
| output_tokens | `output`, with thinking, which is billed whole though only a summary is shown |
| output_tokens_details.thinking_tokens | `reasoning` |
| server_tool_use.web_search_requests | `searches` |
| server_tool_use, its other counts | `tool_calls` |
"""

from typing import Any

from gateway.engines.ports.split import Split, count


def split_of_usage(usage: dict[str, Any]) -> Split:
    creation = usage.get("cache_creation")
    written = count(usage, "cache_creation_input_tokens")
    long = min(
        written or count(creation, "ephemeral_1h_input_tokens"),
        count(creation, "ephemeral_1h_input_tokens"),
    )
    short = written - long if written else count(creation, "ephemeral_5m_input_tokens")
    output = count(usage, "output_tokens")
    used = usage.get("server_tool_use")
    tools = used if isinstance(used, dict) else None
    return Split(
        input=count(usage, "input_tokens"),
        cache_read=count(usage, "cache_read_input_tokens"),
        cache_write=short,
        cache_write_long=long,
        output=output,
        reasoning=min(output, count(usage.get("output_tokens_details"), "thinking_tokens")),
        searches=count(tools, "web_search_requests"),
        tool_calls=sum(count(tools, name) for name in tools or () if name != "web_search_requests"),
    )


def merged(first: dict[str, Any], later: Any) -> dict[str, Any]:
    """The counts of a stream: those of its end are of the whole, and those that it leaves out stay."""
    if not isinstance(later, dict):
        return first
    return first | {name: value for name, value in later.items() if value is not None}
