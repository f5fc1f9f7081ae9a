"""`chat_template_kwargs`: variables that a client hands to the model's chat template.

Their texts may end up in the prompt, so they are screened and stripped of control tokens as the
messages are.
"""

from collections.abc import Iterator
from typing import Any

from core.errors import BadRequest

MAX_DEPTH = 8


def checked(given: dict[str, Any] | None) -> dict[str, Any]:
    """BadRequest for a name that is no identifier, and for values nested too deeply."""
    for name, value in (given or {}).items():
        if not (name.isidentifier() and name.isascii() and len(name) <= 64):
            raise _wrong(f"has the name {name[:80]!r}, which is not an identifier")
        if _depth(value) > MAX_DEPTH:
            raise _wrong(f"nests {name} deeper than {MAX_DEPTH} levels")
    return given or {}


def strings_of(value: Any) -> Iterator[str]:
    """Every text in it, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_of(inner)


def texts_of_variables(variables: dict[str, Any]) -> list[str]:
    """Without the variables' own names, which the template knows."""
    return [text for value in variables.values() for text in strings_of(value)]


def with_texts(variables: dict[str, Any], texts: Iterator[str]) -> dict[str, Any]:
    """The same with its texts replaced, in the order of `texts_of_variables`."""
    return {name: _replaced(value, texts) for name, value in variables.items()}


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {next(texts): _replaced(inner, texts) for inner in value.values()}
    if isinstance(value, list):
        return [_replaced(inner, texts) for inner in value]
    return value


def _depth(value: Any) -> int:
    """Levels of objects and lists; level by level, for the input may be nested without bound."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            return depth
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _wrong(problem: str) -> BadRequest:
    return BadRequest(
        f"chat_template_kwargs {problem}.",
        next_step='Send an object such as {"enable_thinking": false}.',
        param="chat_template_kwargs",
        code="invalid_value",
    )
