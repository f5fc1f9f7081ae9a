"""Tool calls as servers send them, whole or in pieces, in one form: each piece has the number of its
call among the choice's calls, and its arguments are text.

Servers number the pieces in their own ways: with the same index for all calls, without any, or with
one that comes late. A new id, or a name where a call has one, begins a new call.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from gateway.engines.surrogates import whole_text, whole_texts


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    indexed: bool = False

    @property
    def complete(self) -> bool:
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False

    def ends_before(self, own_id: str, name: str, arguments: str) -> bool:
        """Whether a piece with the same index, or with none, is of another call."""
        if own_id and self.id and own_id != self.id:
            # Some servers make an id for each piece: those go on with arguments, without a name.
            return bool(name) or not arguments or self.complete
        if not name or not self.name or (own_id and own_id == self.id):
            return False
        return name != self.name or (bool(arguments.strip()) and self.complete)


class CallPieces:
    """The calls of one choice."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, int] = {}

    def read(self, pieces: Any) -> list[dict[str, Any]]:
        """Raises TypeError for what is not a list of tool calls."""
        if not isinstance(pieces, list):
            raise TypeError(f"tool_calls is {type(pieces).__name__}, not a list")
        return [self._read(piece) for piece in pieces]

    def _read(self, piece: dict[str, Any]) -> dict[str, Any]:
        function = piece.get("function") or {}
        own_id, name = str(piece.get("id") or ""), str(function.get("name") or "")
        arguments = _text_of(function.get("arguments"))
        given = piece.get("index")
        index = given if type(given) is int else None
        number = self._number_of(index, own_id, name, arguments)
        call = self._calls[number]
        call.id, call.name = own_id or call.id, name or call.name
        call.indexed |= index is not None
        call.arguments += [arguments] if arguments else []
        named = {"name": name} if name else {}
        read = {"index": number, "function": {**named, "arguments": arguments}}
        return {**read, "id": own_id} if own_id else read

    def _number_of(self, index: int | None, own_id: str, name: str, arguments: str) -> int:
        if index is None:
            number = self._without_index(own_id, name, arguments)
        elif index in self._by_index:
            number = self._by_index[index]
            if self._calls[number].ends_before(own_id, name, arguments):
                number = None
        else:
            number = self._with_late_index(own_id, name)
        if number is None:
            number = len(self._calls)
            self._calls.append(_Call())
        if index is not None:
            self._by_index[index] = number
        return number

    def _without_index(self, own_id: str, name: str, arguments: str) -> int | None:
        known = self._of_id(own_id)
        if known is not None or not self._calls:
            return known
        last = self._calls[-1]
        if own_id and last.id:
            return None if last.ends_before(own_id, name, arguments) else len(self._calls) - 1
        goes_on = not last.name or (name == last.name and last.arguments and not last.complete)
        return len(self._calls) - 1 if not name or goes_on else None

    def _with_late_index(self, own_id: str, name: str) -> int | None:
        known = self._of_id(own_id)
        if known is not None and not self._calls[known].indexed:
            return known
        return len(self._calls) - 1 if self._calls and not own_id and not name else None

    def _of_id(self, own_id: str) -> int | None:
        numbers = range(len(self._calls) - 1, -1, -1) if own_id else ()
        return next((each for each in numbers if self._calls[each].id == own_id), None)


def whole_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls of an answer that is not streamed."""
    if not isinstance(calls, list):
        raise TypeError(f"tool_calls is {type(calls).__name__}, not a list")
    read = CallPieces().read([{**call, "index": number} for number, call in enumerate(calls)])
    for call in read:
        function = call["function"]
        function["arguments"] = whole_text(function["arguments"])
    return read


def _text_of(arguments: Any) -> str:
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    if not isinstance(arguments, dict):
        raise TypeError(f"the arguments of a tool call are {type(arguments).__name__}")
    return json.dumps(whole_texts(arguments), ensure_ascii=False, separators=(",", ":"))
