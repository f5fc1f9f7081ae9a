"""Types and ranges of the fields of a JSON file that others wrote: what no value can be is refused before
it is read. No torch: gateways check uploads with it."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

Kind = tuple[str, Callable[[Any], bool]]  # in words, and whether a value is of it
Fields = Mapping[str, Kind]
_MOST, _LARGEST = 2**31 - 1, sys.float_info.max
_SHOWN = 200  # characters of a value in a message


def whole(first: int, last: int = _MOST) -> Kind:
    return (
        f"a whole number from {first} to {last}",
        lambda value: type(value) is int and first <= value <= last,
    )


def number(above: float, most: float = _LARGEST) -> Kind:
    limit = f" and at most {most}" if most < _LARGEST else ""
    return (
        f"a finite number above {above}{limit}",
        lambda value: type(value) in (int, float) and above < value <= most,
    )


def every(kind: Kind) -> Kind:
    return (
        f"a list of which each is {kind[0]}",
        lambda value: isinstance(value, list) and all(map(kind[1], value)),
    )


def either(first: Kind, second: Kind) -> Kind:
    return f"{first[0]}, or {second[0]}", lambda value: first[1](value) or second[1](value)


TEXT: Kind = "a text", lambda value: isinstance(value, str) and _is_unicode(value)
OBJECT: Kind = "an object", lambda value: isinstance(value, dict)
FLAG: Kind = "true or false", lambda value: type(value) in (bool, int) and value in (0, 1)


def problem_of(raw: Mapping[str, Any], fields: Fields, prefix: str = "") -> str:
    """The first field whose value is not of its kind, in words; empty if there is none. A null stands
    for the field's default, and fields without a kind are not read."""
    for name, value in raw.items():
        if value is not None and name in fields and not fields[name][1](value):
            return f"{prefix}{name} is {shown(value)}: it must be {fields[name][0]}"
    return ""


def shown(value: Any) -> str:
    """For a message: in one line, and not without end."""
    text = " ".join(ascii(value).split())
    return text if len(text) < _SHOWN else f"{text[:_SHOWN]}..."


def shown_name(name: str) -> str:
    """As it is, if it can stand in a line."""
    return name if name.isprintable() and len(name) < _SHOWN else shown(name)


def _is_unicode(text: str) -> bool:
    """Whether it can be written: JSON may hold one half of a pair of surrogates."""
    return text.isascii() or text == text.encode(errors="replace").decode()
