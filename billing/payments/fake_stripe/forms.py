"""Decodes Stripe's form bodies: `lines[0][period][start]=1` to nested objects and lists."""

from typing import Any
from urllib.parse import parse_qsl


def decode(text: str) -> dict[str, Any]:
    """Leaves are strings; an object whose keys are all digits becomes a list."""
    root: dict[str, Any] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        head, *rest = name.replace("]", "").split("[")
        path = [head, *rest]
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
        last = path[-1] or str(len(at))  # `expand[]=a`
        at[last] = value
    made: dict[str, Any] = _lists(root)
    return made


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {name: _lists(each) for name, each in value.items()}
    if made and all(name.isdigit() for name in made):
        return [made[name] for name in sorted(made, key=int)]
    return made


def integer(form: dict[str, Any], name: str) -> int:
    return int(form.get(name) or 0)


def is_true(form: dict[str, Any], name: str) -> bool:
    return form.get(name) == "true"
