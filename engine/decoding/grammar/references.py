"""What a `$ref` within a JSON schema names: by its path, or by an `$anchor`."""

from typing import Any
from urllib.parse import unquote

_MOST = 20_000  # schemas that are searched for an anchor


def target_of(root: Any, ref: str) -> Any:
    """The schema; None if there is none. `ref` begins with `#` (JSON Schema Core 2020-12, 8.2)."""
    if ref != "#" and not ref.startswith("#/"):
        return _anchored(root, unquote(ref[1:]))
    node = root
    for step in ref[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _anchored(root: Any, name: str) -> Any:
    waiting, seen = [root], 0
    while waiting and seen < _MOST:
        node = waiting.pop()
        seen += 1
        if isinstance(node, dict):
            if node.get("$anchor") == name:
                return node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return None
