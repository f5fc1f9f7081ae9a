"""Parses tool calls in model output: `<tool_call>{…}</tool_call>` as Hermes and Qwen write them, or a
bare JSON object or list at the start of the output, as Llama 3 and Mistral write them.

Only calls of tools that the request declares are parsed; anything else stays unchanged text. Text
that may still become a call is held.
"""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.inference.request import InferenceRequest

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters", "input")
# Starts of a bare call, without white space; any other JSON is text and is not held.
_BARE_STARTS = tuple(
    f'{lead}{{"{key}"'
    for lead in ("", "[")
    for key in ("name", "type", "function", "id", "arguments", "parameters")
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    index: int  # among the tool calls of the choice
    id: str
    name: str
    arguments: str  # JSON


class ToolReader:
    """`feed` and `flush` return (text to send, complete calls)."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._searched = 0  # characters of the held text, which have no closing tag
        self._count = 0
        self._at_start = True  # only white space and calls so far, so a bare call may follow
        self._depth = _JsonScanner()

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        released: list[str] = []
        calls: list[ToolCall] = []
        while self._step(released, calls):
            continue
        return "".join(released), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """End of output: an incomplete call is text, white space after a call is dropped."""
        left, self._held = self._held, ""
        calls = self._parse(left) if self._at_start else []
        if not calls and left.lstrip().startswith(_OPEN):  # the closing tag is missing
            calls = self._parse(left.lstrip().removeprefix(_OPEN))
        if calls or (self._count and not left.strip()):
            return "", calls
        return left, []

    def _step(self, released: list[str], calls: list[ToolCall]) -> bool:
        """Make one decision on the held text. False when more text is needed."""
        held, lead = self._held, 0
        if self._at_start:
            lead = len(held) - len(held.lstrip(" \t\r\n;" if self._count else None))
            if lead == len(held):
                return False
            if held[lead] in "{[":
                return self._bare(lead, released, calls)
        at = held.find(_OPEN)
        if at < 0:
            keep = _partial_tag_length(held)
            if keep == len(held) - lead:
                return False
            self._release(len(held) - keep, released)
            return False
        if at > lead:
            self._release(at, released)
            return True
        end = held.find(_CLOSE, max(0, self._searched - len(_CLOSE)))
        if end < 0:
            self._searched = len(held)
            return False
        self._decide(at + len(_OPEN), end, end + len(_CLOSE), released, calls)
        return True

    def _bare(self, lead: int, released: list[str], calls: list[ToolCall]) -> bool:
        start = "".join(self._held[lead : lead + 80].split())
        if not any(start.startswith(each) or each.startswith(start) for each in _BARE_STARTS):
            self._at_start = False
            return True
        end = self._depth.end_of(self._held, lead)
        if end is None:
            return False
        self._decide(lead, end, end, released, calls)
        return True

    def _decide(
        self, begin: int, end: int, whole: int, released: list[str], calls: list[ToolCall]
    ) -> None:
        """Parse held text from `begin` to `end`; up to `whole` it becomes calls, or text."""
        parsed_calls = self._parse(self._held[begin:end])
        if not parsed_calls:
            self._release(whole, released)
            return
        calls += parsed_calls
        self._drop(whole, at_start=True)

    def _release(self, length: int, released: list[str]) -> None:
        released.append(self._held[:length])
        self._drop(length, at_start=False)

    def _drop(self, length: int, *, at_start: bool) -> None:
        self._held, self._at_start, self._depth = self._held[length:], at_start, _JsonScanner()
        self._searched = 0

    def _parse(self, text: str) -> list[ToolCall]:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return []
        listed = parsed if isinstance(parsed, list) else [parsed]
        parsed_calls = [self._call(each) for each in listed]
        if not parsed_calls or None in parsed_calls:
            return []
        result = []
        for each in parsed_calls:
            assert each is not None
            result.append(ToolCall(self._count, *each))
            self._count += 1
        return result

    def _call(self, parsed: Any) -> tuple[str, str, str] | None:
        if isinstance(parsed, dict) and isinstance(parsed.get("function"), dict):
            parsed = {**parsed["function"], "id": parsed.get("id")}
        name = parsed.get("name") if isinstance(parsed, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        given: Any = next((parsed[name] for name in _ARGUMENTS if name in parsed), {})
        try:
            written = json.loads(given) if isinstance(given, str) else given or {}
        except ValueError:
            return None
        if not isinstance(written, dict):
            return None
        arguments = given if isinstance(given, str) else json.dumps(written, ensure_ascii=False)
        named = parsed.get("id")
        own = named if isinstance(named, str) and named else f"call_{secrets.token_hex(12)}"
        return own, name, arguments


class _JsonScanner:
    """Finds the end of a JSON value incrementally, reading each character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = self._escaped = False

    def end_of(self, text: str, begin: int) -> int | None:
        for position in range(max(self._at, begin), len(text)):
            character = text[position]
            self._at = position + 1
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None


def reader_for(request: InferenceRequest) -> ToolReader | None:
    if not request.tools:
        return None
    return ToolReader(str(tool["function"]["name"]) for tool in request.tools)


def as_text(calls: Iterable[dict[str, Any]]) -> str:
    """Tool calls that an upstream parsed, as model output, so that they pass the guard and the token
    count like other text."""
    return "".join(f"{_OPEN}{json.dumps(call, ensure_ascii=False)}{_CLOSE}" for call in calls)


class ArgumentGuard(Protocol):
    """The part of an output guard that `clean_call` needs."""

    def clean(self, text: str, *, record: bool = False) -> str | None:
        """The text after the rules; None when blocked."""


def clean_call(call: ToolCall, guard: ArgumentGuard) -> ToolCall | None:
    """The call after the guard's rules on its decoded texts: escapes such as `\\u0040` hide a match
    from the guard of the stream. None when a text is blocked."""
    given = json.loads(call.arguments)
    own_id = guard.clean(call.id, record=True)
    try:
        arguments = _cleaned(given, guard)
    except _Blocked:
        return None
    if own_id is None:
        return None
    text = call.arguments if arguments == given else json.dumps(arguments, ensure_ascii=False)
    return replace(call, id=own_id, arguments=text)


class _Blocked(Exception):
    pass


def _cleaned(value: Any, guard: ArgumentGuard) -> Any:
    if isinstance(value, str):
        text = guard.clean(value, record=True)
        if text is None:
            raise _Blocked
        return text
    if isinstance(value, dict):
        return {_cleaned(key, guard): _cleaned(inner, guard) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(each, guard) for each in value]
    return value


def _partial_tag_length(held: str) -> int:
    """Length of the longest suffix that is a prefix of the opening tag."""
    for length in range(min(len(_OPEN) - 1, len(held)), 0, -1):
        if _OPEN.startswith(held[-length:]):
            return length
    return 0
