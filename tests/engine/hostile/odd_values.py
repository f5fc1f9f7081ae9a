"""Values that a JSON file may hold where none of them belongs, and documents that hold one."""

import json
import random
from collections.abc import Callable
from typing import Any

Path = tuple[str | int, ...]
_RAW = "\x00raw {}\x00"


class Raw:
    """JSON text that the library would not write."""

    def __init__(self, text: str) -> None:
        self.text = text


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


FIXED: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 0.5, 1.0, -0.5, 1e-320, 1e-30, 1e30, 1e308, 2**31 - 1,
    2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, float("nan"), float("inf"), -float("inf"), "", "x", "1",
    "1.5", "NaN", "null", "default", "\ud800", "\0", "../x", "a" * 100_000, [], {}, [[]], [None], [0],
    [1], [-1], [0.5], ["x"], [True], [float("nan")], [1] * 1000, {"x": 1}, {"": {}}, {"x": {"x": {}}},
    Raw("1" * 5000), Raw("-0"), Raw("1E400"), Raw("-1E400"), Raw('{"x": 1, "x": 2}'), _nested(40),
    _nested(3000), _nested(100_000),
)  # fmt: skip


def odd(draw: random.Random, value: Any) -> Any:
    """One of FIXED, or something near to `value`."""
    if draw.random() < 0.65:
        return draw.choice(FIXED)
    near: list[Callable[[], Any]] = [
        lambda: [value], lambda: {"x": value}, lambda: str(value), lambda: {"value": value, "x": None},
        lambda: [value, value], lambda: None,
    ]  # fmt: skip
    if isinstance(value, int | float) and not isinstance(value, bool):
        near += [
            lambda: value * 2, lambda: value + 1, lambda: value - 1, lambda: -value,
            lambda: float(value), lambda: value + 0.5, lambda: value / 2, lambda: value * 1_000_003,
        ]  # fmt: skip
    if isinstance(value, str):
        near += [
            lambda: value.upper(),
            lambda: value + "x",
            lambda: value[:-1],
            lambda: list(value),
        ]
    if isinstance(value, list):
        near += [
            lambda: value[:-1], lambda: value + value, lambda: value * 50, lambda: value[::-1],
            lambda: [odd(draw, each) for each in value], lambda: dict.fromkeys(map(str, value)),
        ]  # fmt: skip
    if isinstance(value, dict):
        near += [
            lambda: list(value), lambda: list(value.values()),
            lambda: {name: odd(draw, each) for name, each in value.items()},
            lambda: value | {"x" * 50: value},
        ]  # fmt: skip
    return draw.choice(near)()


def shown(value: Any) -> str:
    text = value.text if isinstance(value, Raw) else repr(value)
    return ascii(text if len(text) < 60 else f"{text[:60]}...").strip("'\"")


def places(tree: Any, most: int = 400) -> list[Path]:
    """Of every value in the tree but the root; of long lists a few."""
    found: list[Path] = []

    def _walk(value: Any, path: Path) -> None:
        if len(found) > most:
            return
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for number, (key, each) in enumerate(inner):
            if isinstance(value, list) and 8 <= number < len(value) - 4:
                continue
            found.append((*path, key))
            if isinstance(each, dict | list):
                _walk(each, (*path, key))

    _walk(tree, ())
    return found


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(tree: Any, path: Path, value: Any) -> Any:
    """A copy of the tree with another value at the path."""
    if not path:
        return value
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    inner = copy[path[0]] if not isinstance(copy, dict) or path[0] in copy else None
    copy[path[0]] = changed(inner, path[1:], value)
    return copy


def without(tree: Any, path: Path) -> Any:
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(copy[path[0]], path[1:])
    return copy


def written(tree: Any, *, first: tuple[str, Any] | None = None) -> bytes:
    """As JSON. `first`: a name with a value that stands before all others, perhaps a second time."""
    raws: list[str] = []

    def _plain(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value.text)
            return _RAW.format(len(raws) - 1)
        if isinstance(value, dict):
            return {key: _plain(each) for key, each in value.items()}
        return [_plain(each) for each in value] if isinstance(value, list) else value

    text = json.dumps(_plain(tree))
    if first is not None:
        name, value = (json.dumps(_plain(each)) for each in first)
        text = f"{{{name}: {value}, {text[1:]}"
    for number, raw in enumerate(raws):
        text = text.replace(json.dumps(_RAW.format(number)), raw)
    return text.encode()


# Files that are no JSON of the kind that is needed.
BROKEN: dict[str, bytes] = {
    "empty": b"", "a blank": b" ", "null": b"null", "a list": b"[1]", "a text": b'"x"',
    "cut off": b'{"x":',
    "not UTF-8": b"\xff\xfe{}", "a mark of byte order": b"\xef\xbb\xbf{}", "zeros": bytes(64),
    "UTF-16": '{"x": 1}'.encode("utf-16"), "nested deeply": b'{"x":' * 100_000,
    "a pointer of Git": b"version https://git-lfs.github.com/spec/v1\noid sha256:x\nsize 1\n",
    "a page": b"<html>404</html>", "a million names": b'{"":' + b'0,"a":' * 1_000_000 + b"0}",
}  # fmt: skip
