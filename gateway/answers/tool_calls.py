"""Parses tool calls in model output: in one of the forms of `tool_formats.py`, or at the start of the
output as a bare JSON object or list (Llama 3, Mistral) or a list of calls as Python writes them (Llama).

Only calls of tools that the request declares are parsed; anything else stays unchanged text. Text
that may still become a call is held.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gateway.answers.tool_formats import (
    CUT_CALL,
    OPENING,
    BracketScanner,
    ToolFormat,
    format_of,
    parse_either,
    partial_opening,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters", "input")
_LONGEST_NAME = 200  # characters between an opening and the first bracket
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
    arguments: str  # JSON; only its beginning where the output was cut


@dataclass(slots=True)
class PartialCall:
    """A tool call that an upstream sends in pieces."""

    id: Any = None
    name: Any = None
    arguments: list[str] = field(default_factory=list)

    def add(self, piece: dict[str, Any]) -> None:
        function = piece["function"]
        self.id = piece.get("id") or self.id
        self.name = function.get("name") or self.name
        self.arguments.append(function["arguments"])

    @property
    def is_cut(self) -> bool:
        """Whether the arguments are only the beginning of an object."""
        try:
            return not isinstance(json.loads("".join(self.arguments)), dict)
        except ValueError:
            return True

    def joined(self, *, cut: bool = False) -> dict[str, Any]:
        """Without arguments they are an empty object, unless the call was cut."""
        arguments = "".join(self.arguments)
        if cut:
            return {"id": self.id, "name": self.name, "arguments": arguments}
        given = arguments if arguments.strip() else "{}"
        return {"id": self.id, "name": self.name, "arguments": given}


class ToolReader:
    """`feed` and `flush` return (text to send, complete calls)."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._searched = 0  # characters of the held text, which have no closing tag
        self._count = 0
        self._at_start = True  # only white space and calls so far, so a bare call may follow
        self._scanner = BracketScanner()

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        if not text:
            return "", []
        self._held += text
        released: list[str] = []
        calls: list[ToolCall] = []
        while self._step(released, calls):
            continue
        return "".join(released), calls

    def flush(self, *, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """End of output: an incomplete call is text, white space after a call is dropped. Where the
        output was cut at its longest, a call in tags is what there is of it, as on OpenAI's API."""
        left, self._held = self._held, ""
        calls = self.calls_in(left, parse_either) if self._at_start else []
        opening = OPENING.match(left.lstrip())
        if not calls and opening is not None:  # the closing tag is missing
            body = left.lstrip()[opening.end() :]
            calls = self.calls_in(body, format_of(opening[0]).parse)
        if calls or (self._count and not left.strip()):
            return "", calls
        begun = CUT_CALL.fullmatch(left.lstrip()) if cut else None
        if begun is None or not (begun["name"] is None or begun["name"] in self._names):
            return left, []
        arguments = begun["arguments"] or ""
        return "", self.cut_call(begun["id"], begun["name"] or "", _whole_object(arguments))

    def cut_call(self, own_id: str | None, name: str, arguments: str) -> list[ToolCall]:
        """A call with the arguments so far; none where its name is not whole."""
        if name not in self._names:
            return []
        self._count += 1
        own_id = own_id or f"call_{secrets.token_hex(12)}"
        return [ToolCall(self._count - 1, own_id, name, arguments)]

    def _step(self, released: list[str], calls: list[ToolCall]) -> bool:
        """Make one decision on the held text. False when more text is needed."""
        held, lead = self._held, 0
        if self._at_start:
            lead = len(held) - len(held.lstrip(" \t\r\n;" if self._count else None))
            if lead == len(held):
                return False
            if held[lead] in "{[" and not _may_open(held, lead):
                return self._bare(lead, released, calls)
        opening = OPENING.search(held)
        if opening is None:
            keep = partial_opening(held)
            if keep == len(held) - lead:
                return False
            self._release(len(held) - keep, released)
            return False
        if opening.start() > lead:
            self._release(opening.start(), released)
            return True
        form, begin = format_of(opening[0]), opening.end()
        end = self._end_of(form, begin)
        if end is None:
            return False
        if end < 0:
            self._release(begin, released)
            return True
        parsed_calls = self.calls_in(held[begin:end], form.parse)
        whole = end + len(form.close or "")
        self._decide(parsed_calls, whole, released, calls)
        return True

    def _end_of(self, form: ToolFormat, begin: int) -> int | None:
        """Where the call's text ends; None while more is needed, -1 where it is none."""
        held = self._held
        if form.close is not None:
            end = held.find(form.close, max(begin, self._searched - len(form.close)))
            self._searched = len(held)
            return end if end >= 0 else None
        text = held[begin : begin + _LONGEST_NAME]
        first = text.lstrip()[:1]
        at = text.find(first if first in ("{", "[") else "{") if first else -1
        if at < 0:
            return None if len(held) < begin + _LONGEST_NAME else -1
        return self._scanner.end_of(held, begin + at, "\"'" if first == "[" else '"')

    def _bare(self, lead: int, released: list[str], calls: list[ToolCall]) -> bool:
        start = "".join(self._held[lead : lead + 300].split())
        # Of a bare call, without white space; any other JSON or list is text, and not held.
        possible = (*_BARE_STARTS, *(f"[{name}(" for name in self._names))
        starts = [each for each in possible if start.startswith(each) or each.startswith(start)]
        if not starts:
            self._at_start = False
            return True
        python = all("(" in each for each in starts)
        if not python and any("(" in each for each in starts):
            return False  # which of the two it is shows with more text
        end = self._scanner.end_of(self._held, lead, "\"'" if python else '"')
        if end is None:
            return False
        self._decide(self.calls_in(self._held[lead:end], parse_either), end, released, calls)
        return True

    def _decide(
        self, parsed: list[ToolCall], whole: int, released: list[str], calls: list[ToolCall]
    ) -> None:
        """The held text up to `whole` becomes these calls, or text where there is none."""
        if not parsed:
            self._release(whole, released)
            return
        calls += parsed
        self._drop(whole, at_start=True)

    def _release(self, length: int, released: list[str]) -> None:
        released.append(self._held[:length])
        self._drop(length, at_start=False)

    def _drop(self, length: int, *, at_start: bool) -> None:
        self._held, self._at_start, self._scanner = self._held[length:], at_start, BracketScanner()
        self._searched = 0

    def calls_in(self, text: str, parse: Callable[[str], list[Any]]) -> list[ToolCall]:
        """The calls that `parse` finds; none unless all are of declared tools."""
        parsed_calls = [self._call(each) for each in parse(text)]
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
        given = given if not isinstance(given, str) or given.strip() else {}
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


def _whole_object(text: str) -> str:
    """The JSON object at the beginning of the text, or the text where that is not complete."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def _may_open(held: str, lead: int) -> bool:
    """Whether an opening begins there, or may."""
    start = held[lead : lead + 40]
    return OPENING.match(start) is not None or partial_opening(start) == len(start) > 1


def as_text(calls: Iterable[dict[str, Any]]) -> str:
    """Tool calls that an upstream parsed, as model output, so that they pass the guard and the token
    count like other text."""
    return "".join(f"{_OPEN}{json.dumps(call, ensure_ascii=False)}{_CLOSE}" for call in calls)


def cut_text(call: dict[str, Any]) -> str:
    """The last call of an answer that an upstream has cut, as model output that was cut there."""
    own_id, name = json.dumps(call["id"] or ""), json.dumps(call["name"])
    return f'{_OPEN}{{"id": {own_id}, "name": {name}, "arguments": {call["arguments"]}'


class ArgumentGuard(Protocol):
    """The part of an output guard that `clean_call` needs."""

    def clean(self, text: str, *, record: bool = False) -> str | None:
        """The text after the rules; None when blocked."""


def clean_call(call: ToolCall, guard: ArgumentGuard) -> ToolCall | None:
    """The call after the guard's rules on its decoded texts: escapes such as `\\u0040` hide a match
    from the guard of the stream. None when a text is blocked."""
    try:
        given = json.loads(call.arguments)
    except ValueError:  # of a call that was cut: a text
        given = call.arguments
    own_id = guard.clean(call.id, record=True)
    try:
        arguments = _cleaned(given, guard)
    except _Blocked:
        return None
    if own_id is None:
        return None
    text = call.arguments
    if arguments != given:
        is_text = isinstance(arguments, str)
        text = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
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
