"""What Bedrock's `usage` includes; in a stream it comes in the `metadata` event alone, after the end.

| field | of the canonical split |
|---|---|
| inputTokens | `input`: it excludes what the cache gave and took |
| cacheReadInputTokens | `cache_read` |
| cacheWriteInputTokens | `cache_write`, without what `cacheDetails` says is kept for `1h` |
| cacheDetails[ttl=1h].inputTokens | `cache_write_long` |
| outputTokens | `output`, with reasoning, which is not counted by itself |
"""

from typing import Any

from gateway.engines.ports.split import Split, count


def split_of_usage(usage: dict[str, Any]) -> Split:
    written = count(usage, "cacheWriteInputTokens", "cacheWriteInputTokenCount")
    listed = usage.get("cacheDetails")
    details = listed if isinstance(listed, list) else []
    long = sum(
        count(each, "inputTokens")
        for each in details
        if isinstance(each, dict) and each.get("ttl") == "1h"
    )
    long = min(long, written)
    return Split(
        input=count(usage, "inputTokens"),
        cache_read=count(usage, "cacheReadInputTokens", "cacheReadInputTokenCount"),
        cache_write=written - long,
        cache_write_long=long,
        output=count(usage, "outputTokens"),
    )
