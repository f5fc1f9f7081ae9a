"""Parses tool calls in model output: `<tool_call>{…}</tool_call>` as Hermes and Qwen write them, or a
bare JSON object or list at the start of the output, as Llama 3 and Mistral write them.

Only calls of tools that the request declares are parsed; anything else stays unchanged text. Text
that may still become a call is held.
"""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.ask import Ask

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters", "input")
# Starts of a bare call, without white space; any other JSON is text and is not held.
_BARE = tuple(
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
        self._count = 0
        self._at_start = True  # only white space and calls so far, so a bare call may follow
        self._depth = _Depth()

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while self._step(shown, calls):
            continue
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """End of output: an incomplete call is text, white space after a call is dropped."""
        left, self._held = self._held, ""
        calls = self._read(left) if self._at_start else []
        if not calls and left.lstrip().startswith(_OPEN):  # the closing tag is missing
            calls = self._read(left.lstrip().removeprefix(_OPEN))
        if calls or (self._count and not left.strip()):
            return "", calls
        return left, []

    def _step(self, shown: list[str], calls: list[ToolCall]) -> bool:
        """Make one decision on the held text. False when more text is needed."""
        held, lead = self._held, 0
        if self._at_start:
            lead = len(held) - len(held.lstrip(" \t\r\n;" if self._count else None))
            if lead == len(held):
                return False
            if held[lead] in "{[":
                return self._bare(lead, shown, calls)
        at = held.find(_OPEN)
        if at < 0:
            keep = _undecided(held)
            if keep == len(held) - lead:
                return False
            self._show(len(held) - keep, shown)
            return False
        if at > lead:
            self._show(at, shown)
            return True
        end = held.find(_CLOSE)
        if end < 0:
            return False
        self._decide(at + len(_OPEN), end, end + len(_CLOSE), shown, calls)
        return True

    def _bare(self, lead: int, shown: list[str], calls: list[ToolCall]) -> bool:
        begun = "".join(self._held[lead : lead + 80].split())
        if not any(begun.startswith(each) or each.startswith(begun) for each in _BARE):
            self._at_start = False
            return True
        end = self._depth.end_of(self._held, lead)
        if end is None:
            return False
        self._decide(lead, end, end, shown, calls)
        return True

    def _decide(
        self, begin: int, end: int, whole: int, shown: list[str], calls: list[ToolCall]
    ) -> None:
        """Parse held text from `begin` to `end`; up to `whole` it becomes calls, or text."""
        found = self._read(self._held[begin:end])
        if not found:
            self._show(whole, shown)
            return
        calls += found
        self._held, self._at_start, self._depth = self._held[whole:], True, _Depth()

    def _show(self, length: int, shown: list[str]) -> None:
        shown.append(self._held[:length])
        self._held, self._at_start, self._depth = self._held[length:], False, _Depth()

    def _read(self, text: str) -> list[ToolCall]:
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return []
        listed = told if isinstance(told, list) else [told]
        found = [self._call(each) for each in listed]
        if not found or None in found:
            return []
        made = []
        for each in found:
            assert each is not None
            made.append(ToolCall(self._count, *each))
            self._count += 1
        return made

    def _call(self, told: Any) -> tuple[str, str, str] | None:
        if isinstance(told, dict) and isinstance(told.get("function"), dict):
            told = {**told["function"], "id": told.get("id")}
        name = told.get("name") if isinstance(told, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        given: Any = next((told[name] for name in _ARGUMENTS if name in told), {})
        try:
            written = json.loads(given) if isinstance(given, str) else given or {}
        except ValueError:
            return None
        if not isinstance(written, dict):
            return None
        arguments = given if isinstance(given, str) else json.dumps(written, ensure_ascii=False)
        named = told.get("id")
        own = named if isinstance(named, str) and named else f"call_{secrets.token_hex(12)}"
        return own, name, arguments


class _Depth:
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


def reader_for(ask: Ask) -> ToolReader | None:
    if not ask.tools:
        return None
    return ToolReader(str(tool["function"]["name"]) for tool in ask.tools)


def as_text(calls: Iterable[dict[str, Any]]) -> str:
    """Tool calls that an upstream parsed, as model output, so that they pass the guard and the token
    count like other text."""
    return "".join(f"{_OPEN}{json.dumps(call, ensure_ascii=False)}{_CLOSE}" for call in calls)


def _undecided(held: str) -> int:
    """Length of the longest suffix that is a prefix of the opening tag."""
    for length in range(min(len(_OPEN) - 1, len(held)), 0, -1):
        if _OPEN.startswith(held[-length:]):
            return length
    return 0
