"""Lists of tools in prompt order, with the texts that a model reads. A client sends the same list with
each request: it is sorted and written once, for its own tenant alone."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from gateway.prompts.prompt_order import sort_tools

_encoder = json.JSONEncoder(ensure_ascii=False)
# Perhaps of numbers that the two write differently. All begin with a digit, to which the search
# skips: with alternatives in place of that it took four fifths of the whole time.
_UNLIKE = re.compile(rb"[0-9](?:e[-+0-9]|\.0000|[0-9]{15})")


def json_text(value: Any) -> str:
    try:
        raw = orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or half of a surrogate pair
        return _encoder.encode(value)
    if _UNLIKE.search(raw) or b"null" in raw:  # of a number that is not finite, perhaps
        return _encoder.encode(value)
    return msgspec.json.format(raw, indent=0).decode()


# Hidden from models, but for providers that read them: see `engines/ports`.
GATEWAY_MARKS = frozenset(
    ("cache_control", "volatile", "rank", "reasoning_details", "of_call", "is_error", "document")
)
_MOST_BYTES = 16_384  # of one list
_MOST_LISTS = 256  # of at most 0.1 MB each, parsed


class ToolList(list[dict[str, Any]]):
    """Shared by requests, so never changed. `moved`: whether the client gave another order."""

    __slots__ = ("moved", "names", "texts")

    moved: bool
    names: tuple[str, ...]
    texts: tuple[str, ...]


_known: OrderedDict[tuple[str, bytes], ToolList] = OrderedDict()
_lock = threading.Lock()


def tool_list(tenant_id: str, tools: Sequence[dict[str, Any]]) -> ToolList | None:
    """The tools in the order `safe`; None for a list that is not kept: a large one, or one with marks
    of ours."""
    try:
        key = (tenant_id, orjson.dumps(tools))
    except TypeError:  # an integer of more than 64 bits, or half of a surrogate pair
        return None
    if len(key[1]) > _MOST_BYTES:
        return None
    with _lock:
        found = _known.get(key)
        if found is not None:
            _known.move_to_end(key)
            return found
    if not all(map(GATEWAY_MARKS.isdisjoint, tools)):
        return None
    found = _sorted(tools)
    with _lock:
        _known[key] = found
        while len(_known) > _MOST_LISTS:
            _known.popitem(last=False)
    return found


def _sorted(tools: Sequence[dict[str, Any]]) -> ToolList:
    ordered = ToolList(sort_tools(tools))
    ordered.moved = any(one is not other for one, other in zip(ordered, tools, strict=True))
    ordered.names = tuple([str(tool["function"]["name"]) for tool in ordered])
    ordered.texts = tuple(map(json_text, ordered))
    return ordered


def flat_name(namespace: str, name: str) -> str:
    """A namespaced tool's name for the model: names of functions have no other structure."""
    return f"{namespace}__{name}"
