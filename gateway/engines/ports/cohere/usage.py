"""What Cohere's `usage` includes. It bills other counts than it reads and writes: `billed_units`, which
leave out what its own prompts add.

| field | of the canonical split |
|---|---|
| billed_units.input_tokens, else tokens.input_tokens | all input |
| cached_tokens | `cache_read`, of them |
| billed_units.output_tokens, else tokens.output_tokens | `output`, with thinking |
| billed_units.search_units | `searches` |
"""

from typing import Any

from gateway.engines.ports.split import Split, count, split_of


def split_of_usage(usage: dict[str, Any]) -> Split:
    billed, tokens = usage.get("billed_units"), usage.get("tokens")
    return split_of(
        _whole(billed, "input_tokens") or _whole(tokens, "input_tokens"),
        read=_whole(usage, "cached_tokens"),
        output=_whole(billed, "output_tokens") or _whole(tokens, "output_tokens"),
        searches=_whole(billed, "search_units"),
    )


def _whole(holder: Any, name: str) -> int:
    """Cohere writes some counts as floats."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if type(value) is float and value.is_integer():
        return count({name: int(value)}, name)
    return count(holder, name)
