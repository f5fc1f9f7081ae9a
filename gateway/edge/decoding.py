"""Decodes JSON bodies into typed structs, and dates, with errors that name the field."""

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from functools import cache
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from core import lengths
from core.clock import usual
from core.errors import BadRequest, UnsupportedParameter


def parse_datetime(text: str, name: str | None = None, zone: tzinfo = UTC) -> datetime:
    """Parses ISO 8601; without an offset it is of the zone. `name` is the parameter that an error
    names."""
    try:
        moment = datetime.fromisoformat(text)
        return usual(moment if moment.tzinfo else moment.replace(tzinfo=zone).astimezone(UTC))
    except ValueError:
        subject = f"{name} is" if name else "The value is"
        raise BadRequest(
            f"{subject} {text[:40]!r}, which is not an ISO 8601 date of the years 1970 to 2199.",
            next_step="Write 2026-01-31, or 2026-01-31T12:00:00Z.",
            param=name,
        ) from None


# Bounds the number of values in a large JSON body before it is decoded.
#
# A decoder holds the interpreter's lock while it builds its objects: a few megabytes of empty arrays are
# millions of objects, and pause everything else for seconds. Text costs nothing.


MAX_CONTAINERS = 100_000  # objects and arrays
MAX_VALUES = 500_000
_CHECKED_FROM = 65_536  # bytes; smaller bodies hold fewer values
_COMMA = ord(",")
# A whole string, or one character of the structure.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{\[,]', re.DOTALL)


def check_json_size(raw: bytes) -> None:
    """Blocking for large bodies. Raises BadRequest."""
    if len(raw) < _CHECKED_FROM or not _exceeds(_structure(raw)):
        return
    # Prose and code have commas and brackets too: count outside of strings.
    if _exceeds(_structure_outside_strings(raw)):
        raise BadRequest(
            f"The body has more than {MAX_VALUES} values or {MAX_CONTAINERS} objects and arrays.",
            next_step="Send fewer, or split the request.",
            code="invalid_json",
        )


def _exceeds(counts: tuple[int, int]) -> bool:
    return counts[0] > MAX_CONTAINERS or counts[1] > MAX_VALUES


def _structure(raw: bytes) -> tuple[int, int]:
    """(objects and arrays, separators)"""
    return raw.count(b"{") + raw.count(b"["), raw.count(b",")


def _structure_outside_strings(raw: bytes) -> tuple[int, int]:
    """As far as the bounds. A loop in Python, so that other threads run meanwhile."""
    containers = separators = 0
    for token in _TOKEN.finditer(raw):
        first = raw[token.start()]
        containers += first in b"{["
        separators += first == _COMMA
        if _exceeds((containers, separators)):
            break
    return containers, separators


Body = TypeVar("Body")
Parsed = TypeVar("Parsed")
# Labels that a customer attaches to an object, with OpenAI's bounds.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
_INLINE_BYTES = 32_768  # less than a millisecond
_MAX_NULL_FIELDS = 32  # unknown names of one body; each costs one more decoding
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_NULL = re.compile(r"Expected `([^`]*)`, got `null`")
_KINDS = {"str": "a string", "array": "a list", "int": "an integer", "float": "a number",
          "bool": "true or false", "object": "an object"}  # fmt: skip
_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the request bodies. Unknown fields are an error, never ignored."""


def decode(decoder: "msgspec.json.Decoder[Body]", raw: bytes) -> Body:
    return decode_open(decoder, raw, None)


def decode_open(
    decoder: "msgspec.json.Decoder[Body]", raw: bytes, extra: dict[str, Any] | None
) -> Body:
    """Moves top-level fields that the route does not know into `extra`; without it they are an
    error."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if _UNKNOWN.search(str(error)):
            return _without_unknown(decoder, raw, extra)
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"The body is not valid JSON: {error}.",
            next_step="Send one JSON object, encoded as UTF-8.",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise nested_too_deeply() from None


def _without_unknown(
    decoder: "msgspec.json.Decoder[Body]", raw: bytes, extra: dict[str, Any] | None
) -> Body:
    """Decodes a body without its unknown fields that are null, which is how some SDKs write what is
    not set, and those that `extra` takes."""
    content = msgspec.json.decode(raw)
    for left in reversed(range(_MAX_NULL_FIELDS)):
        try:
            body: Body = msgspec.convert(content, decoder.type)
        except msgspec.ValidationError as error:
            unknown, where = _UNKNOWN.search(str(error)), _WHERE.search(str(error))
            path = where.group(1) if where else ""
            name = unknown.group(1) if unknown else ""
            taken = bool(name) and _remove_null(content, path, name)
            if not taken and name and not path and extra is not None:
                extra[name] = content.pop(name)
                taken = True
            if not left or not taken:
                raise _field_error(re.sub(r"\[\d+\]", "[...]", str(error))) from None
        else:
            break
    return body


def _remove_null(content: Any, path: str, name: str) -> bool:
    """Removes the field wherever it is null among the items of a list. `path` is msgspec's, such as
    `messages[0].content`."""
    holders = [content]
    for index, key in _STEP.findall(path):
        kind = list if index else dict
        held = [each for each in holders if isinstance(each, kind)]
        holders = (
            [item for each in held for item in each]
            if index
            else [each[key] for each in held if key in each]
        )
    nulls = [each for each in holders if isinstance(each, dict) and each.get(name, 0) is None]
    for each in nulls:
        del each[name]
    return bool(nulls)


async def parse_body(parse: Callable[[bytes], Parsed], raw: bytes) -> Parsed:
    """Parses a large body in a thread, and only if the number of its values is bounded."""
    if len(raw) <= _INLINE_BYTES:
        return parse(raw)

    def _parse() -> Parsed:
        check_json_size(raw)
        return parse(raw)

    return await asyncio.to_thread(_parse)


def unknown_parameter(name: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{name} is not a parameter of this route.", next_step=f"Remove {name}.", param=name
    )


def nested_too_deeply() -> BadRequest:
    return BadRequest(
        "The JSON of the body is nested too deeply.",
        next_step="Send a flatter object.",
        code="invalid_json",
    )


def refuse_unsupported(body: msgspec.Struct, ignored_values: dict[str, tuple[Any, ...]]) -> None:
    """Raises UnsupportedParameter for a parameter in `ignored_values` whose value is not listed there."""
    given = _reader(tuple(ignored_values))(body)
    if given.count(None) == len(given):
        return
    for (name, values), value in zip(ignored_values.items(), given, strict=True):
        if value is None or value is msgspec.UNSET or value in values:
            continue
        raise UnsupportedParameter(
            f"{name} is not supported by this model.",
            next_step=f"Remove {name}.",
            param=name,
        )


@cache
def _reader(names: tuple[str, ...]) -> Callable[[msgspec.Struct], tuple[Any, ...]]:
    if len(names) == 1:
        return lambda body: (getattr(body, names[0]),)
    return attrgetter(*names)


def given_names(body: msgspec.Struct) -> tuple[str, ...]:
    """The names of the fields that are set, in the order of the fields."""
    names, values = body.__struct_fields__, astuple(body)
    given = tuple(compress(names, values))
    if len(given) + values.count(None) == len(values):
        return given
    return tuple(compress(names, map(is_not, values, repeat(None))))  # some are 0, false or empty


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise BadRequest(
            f"{name} is {value}; it must be between {_written(low)} and {_written(high)}.",
            next_step=f"Correct {name}.",
            param=name,
            code="invalid_value",
        )


def _written(bound: float) -> str:
    """In full: `:g` has six digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def check_label(name: str, value: str | None, max_length: int = lengths.END_USER) -> str | None:
    """Validates a client string that is stored as a label: printable, at most `max_length` characters."""
    if value is None:
        return None
    if len(value) > max_length or not value.isprintable():
        raise BadRequest(
            f"{name} must be at most {max_length} printable characters.",
            next_step=f"Shorten {name} and remove control characters.",
            param=name,
            code="invalid_value",
        )
    return value


def _field_error(message: str) -> BadRequest:
    where = _WHERE.search(message)
    path = where.group(1).replace("[...]", "[]") if where else ""
    unknown = _UNKNOWN.search(message)
    if unknown:
        name = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return unknown_parameter(name)
    text = _WHERE.sub("", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        text = f"{path} is missing"
    null = _NULL.match(text)
    if null and path:
        text = f"{path} is null; it must be {_kinds(null.group(1))}"
    return BadRequest(
        f"{path + ': ' if path and not (missing or null) else ''}{text}.",
        next_step="Correct the field; /docs lists every parameter.",
        param=path or None,
        code="invalid_value" if not missing else "missing_required_parameter",
    )


def _kinds(given: str) -> str:
    """msgspec's `str | array` in words."""
    return " or ".join(_KINDS.get(kind, kind) for kind in given.split(" | "))
