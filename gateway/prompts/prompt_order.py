"""Reorders a chat request so that static content comes first and prefix caches hit.

The rule: only whole tools and whole blocks change places; what is inside a tool or a block stays byte
for byte as the client sent it. A model writes the properties of a JSON schema in the schema's order
(such as reasoning before an answer), so the keys and arrays of a schema are never sorted. A list of
tools is a set by the APIs' definition: `safe` sorts it by name. `full` also moves volatile blocks
behind the static ones, among the leading system blocks and within each of them.

Pure functions on the messages and tools. The order depends only on the leading system blocks (so it
is stable across the turns of a conversation), and reordering is idempotent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import re2

CACHE_MARK = "cache_control"
VOLATILE_MARK = "volatile"

Message = Mapping[str, Any]
Volatile = Callable[[str], bool]


class PromptOrder(StrEnum):
    OFF = "off"
    SAFE = "safe"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class OrderedPrompt:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    changed: tuple[str, ...]  # of: tools, volatile


def reorder(
    order: PromptOrder,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    is_volatile: Volatile | None = None,
) -> OrderedPrompt:
    """`is_volatile(text)` is the tenant's rule for blocks that the client did not mark."""
    plain = [dict(message) for message in messages]
    given = [dict(tool) for tool in tools]
    if order is PromptOrder.OFF:
        return OrderedPrompt(plain, given, ())
    changed: list[str] = []
    sorted_tools = sort_tools(given)
    if [_name_of(tool) for tool in sorted_tools] != [_name_of(tool) for tool in given]:
        changed.append("tools")
    if order is PromptOrder.FULL:
        moved = static_first(plain, is_volatile or (lambda _text: False))
        if moved != plain:
            changed.append("volatile")
        plain = moved
    return OrderedPrompt(plain, sorted_tools, tuple(changed))


def sort_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by name; unchanged when a tool has a cache mark, whose position has a meaning."""
    if any(CACHE_MARK in tool or CACHE_MARK in tool.get("function", {}) for tool in tools):
        return list(tools)
    return sorted(tools, key=_name_of)


def _name_of(tool: Message) -> str:
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return str(named.get("name", ""))


def static_first(messages: Sequence[dict[str, Any]], is_volatile: Volatile) -> list[dict[str, Any]]:
    """Moves static blocks to the front, among the leading system messages and within each of them.

    A leading message whose parts are all volatile is volatile as a whole. Messages from the first
    one of another role on keep their position.
    """
    lead = 0
    while lead < len(messages) and messages[lead].get("role") in ("system", "developer"):
        lead += 1
    arranged = [_parts_static_first(message, is_volatile) for message in messages[:lead]]
    return _partition(arranged, lambda m: _message_is_volatile(m, is_volatile)) + list(
        messages[lead:]
    )


def _parts_static_first(message: dict[str, Any], is_volatile: Volatile) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or any(CACHE_MARK in part for part in _dicts(content)):
        return message
    return {
        **message,
        "content": _partition(content, lambda part: _part_is_volatile(part, is_volatile)),
    }


def _message_is_volatile(message: Message, is_volatile: Volatile) -> bool:
    if CACHE_MARK in message:
        return False
    if isinstance(message.get(VOLATILE_MARK), bool):
        return bool(message[VOLATILE_MARK])
    content = message.get("content")
    if isinstance(content, list):
        return bool(content) and all(_part_is_volatile(part, is_volatile) for part in content)
    return isinstance(content, str) and is_volatile(content)


def _part_is_volatile(part: Any, is_volatile: Volatile) -> bool:
    if not isinstance(part, Mapping):
        return False
    if isinstance(part.get(VOLATILE_MARK), bool):
        return bool(part[VOLATILE_MARK])
    text = part.get("text")
    return isinstance(text, str) and is_volatile(text)


def _partition(items: Sequence[Any], last: Callable[[Any], bool]) -> list[Any]:
    judged = [(item, last(item)) for item in items]
    return [item for item, goes in judged if not goes] + [item for item, goes in judged if goes]


def _dicts(items: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [item for item in items if isinstance(item, Mapping)]


# The kinds that a tenant's `volatile` setting may name.
VOLATILE_PATTERNS = {
    "dates": r"\b(\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d{2}(:\d{2})?"
    r"|(?i:mon|tues|wednes|thurs|fri|satur|sun)day,? )",
    "ids": r"\b([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|[0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{24,64})\b",
    "documents": r"(?i)^\s*(<(documents?|context|retrieved|search_results)\b|\[(document|source) \d+)",
}


def volatile_rule(kinds: Iterable[str], patterns: Iterable[str] = ()) -> Volatile:
    """Combines named kinds and the tenant's RE2 patterns. Raises ValueError for an invalid one."""
    sources = []
    for kind in kinds:
        if kind not in VOLATILE_PATTERNS:
            known = ", ".join(sorted(VOLATILE_PATTERNS))
            raise ValueError(f"unknown kind of volatile block {kind!r}; known: {known}")
        sources.append(VOLATILE_PATTERNS[kind])
    try:
        compiled = [re2.compile(source) for source in (*sources, *patterns)]
    except re2.error as error:
        raise ValueError(f"a volatile pattern is not a valid RE2 expression: {error}") from None
    return lambda text: any(pattern.search(text) for pattern in compiled)
