"""Reorders a chat request so that static content comes first and prefix caches hit.

Pure functions on the messages and tools. Message text is never changed, the order depends only on the
leading system blocks (so it is stable across the turns of a conversation), and reordering is
idempotent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# JSON Schema keywords whose arrays are sets by specification (draft 2020-12, 6.5.3 and 6.5.4).
# `enum` is a set too, but models read its order as a preference, so it is kept.
_SET_LIKE = frozenset({"required", "dependentRequired"})
# Keywords whose value maps names chosen by the author to schemas; those names are not keywords.
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
# Keywords whose values are data, not schemas; their arrays keep their order.
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
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
    changed: tuple[str, ...]  # of: schemas, tools, volatile


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
    canonical = [canonical_tool(tool) for tool in given]
    if _differs(canonical, given):
        changed.append("schemas")
    sorted_tools = sort_tools(canonical)
    if [_name_of(tool) for tool in sorted_tools] != [_name_of(tool) for tool in canonical]:
        changed.append("tools")
    if order is PromptOrder.FULL:
        moved = static_first(plain, is_volatile or (lambda _text: False))
        if moved != plain:
            changed.append("volatile")
        plain = moved
    return OrderedPrompt(plain, sorted_tools, tuple(changed))


def canonical_tool(tool: Message) -> dict[str, Any]:
    """The tool with its keys sorted by code point and its schemas in canonical form."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        inner = {
            key: canonical_schema(value) if key == "parameters" else _sorted_keys(value)
            for key, value in sorted(function.items())
        }
        return {
            key: inner if key == "function" else _sorted_keys(tool[key]) for key in sorted(tool)
        }
    return {  # Anthropic's and the Responses API's format: the schema is on the tool itself
        key: canonical_schema(tool[key])
        if key in ("input_schema", "parameters")
        else _sorted_keys(tool[key])
        for key in sorted(tool)
    }


def canonical_schema(schema: Any, names: bool = False) -> Any:
    """A JSON Schema with sorted keys and set-like arrays. `names`: keys are names, not keywords."""
    if isinstance(schema, list):
        return [canonical_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _canonical_value(key, schema[key], names) for key in sorted(schema)}


def _canonical_value(key: str, value: Any, names: bool) -> Any:
    if names:
        return canonical_schema(value)
    if key in _DATA:
        return _sorted_keys(value)
    if key in _SET_LIKE:
        return _sorted_set(value)
    return canonical_schema(value, names=key in _NAMED_SCHEMAS)


def _sorted_set(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    if isinstance(value, Mapping):  # dependentRequired: name -> list of names
        return {key: _sorted_set(value[key]) for key in sorted(value)}
    return value


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted_keys(item) for item in value]
    return value


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


def _differs(left: Any, right: Any) -> bool:
    """Unlike `!=`, compares the order of keys too, because templates serialise it."""
    return repr(left) != repr(right)
