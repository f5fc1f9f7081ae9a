"""The columns of charges and roll-ups that count and price each component.

A count is what was used, whatever priced it: cache writes are cache writes also where the price has no
rate for them. `billing.pricing.pricing.priced_quantities` says which rate prices what.
"""

from collections.abc import Callable, Mapping
from typing import Any

from billing.columns import AMOUNT_COLUMNS
from billing.pricing.pricing import PARTS, Component

AMOUNTS: Mapping[Component, str] = dict(zip(Component, AMOUNT_COLUMNS, strict=False))
# Of a table, of its class, or of a row that has the columns as attributes.
_COUNTS: Mapping[Component, Callable[[Any], Any]] = {
    Component.INPUT: lambda row: (
        row.input_tokens
        - row.cached_tokens
        - row.cache_write_5m_tokens
        - row.cache_write_1h_tokens
        - row.audio_input_tokens
        - row.image_input_tokens
    ),
    Component.CACHED_INPUT: lambda row: row.cached_tokens,
    Component.OUTPUT: lambda row: (
        row.output_tokens - row.reasoning_tokens - row.audio_output_tokens - row.image_output_tokens
    ),
    Component.WAIVED: lambda row: row.waived_tokens,
    Component.REQUEST: lambda row: row.requests,
    Component.ADAPTER: lambda row: row.adapter_requests,
    Component.GPU_SECOND: lambda row: row.gpu_seconds,
    Component.MODERATION: lambda row: row.moderation_calls,
    Component.AUDIO_SECOND: lambda row: row.audio_seconds,
    Component.IMAGE: lambda row: row.images,
    Component.CHARACTER: lambda row: row.characters,
    Component.CACHE_WRITE_5M: lambda row: row.cache_write_5m_tokens,
    Component.CACHE_WRITE_1H: lambda row: row.cache_write_1h_tokens,
    Component.AUDIO_INPUT: lambda row: row.audio_input_tokens,
    Component.IMAGE_INPUT: lambda row: row.image_input_tokens,
    Component.REASONING: lambda row: row.reasoning_tokens,
    Component.AUDIO_OUTPUT: lambda row: row.audio_output_tokens,
    Component.IMAGE_OUTPUT: lambda row: row.image_output_tokens,
    Component.SEARCH: lambda row: row.searches,
    Component.TOOL_CALL: lambda row: row.tool_calls,
}
PART_COLUMNS: Mapping[Component, str] = {
    Component.CACHE_WRITE_5M: "cache_write_5m_tokens",
    Component.CACHE_WRITE_1H: "cache_write_1h_tokens",
    Component.AUDIO_INPUT: "audio_input_tokens",
    Component.IMAGE_INPUT: "image_input_tokens",
    Component.REASONING: "reasoning_tokens",
    Component.AUDIO_OUTPUT: "audio_output_tokens",
    Component.IMAGE_OUTPUT: "image_output_tokens",
    Component.SEARCH: "searches",
    Component.TOOL_CALL: "tool_calls",
}
assert tuple(PART_COLUMNS) == PARTS


def count_of(component: Component, row: Any) -> Any:
    """An expression of a table's class, a number of a row."""
    return _COUNTS[component](row)


def amount_of(component: Component, row: Any) -> Any:
    return getattr(row, AMOUNTS[component])
