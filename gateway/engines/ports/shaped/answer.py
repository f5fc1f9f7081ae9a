"""Reads answers of OpenAI's chats and completions, whole or by events."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.engines.answer_fields import Said, StreamedChoices, whole_choice
from gateway.engines.answer_shapes import plain_event_decoder
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.shaped.dialects import Dialect
from gateway.engines.ports.shaped.usage import split_of_usage
from gateway.engines.ports.split import Split
from gateway.request.thoughts import checked

_REASONS = frozenset(("stop", "length", "tool_calls", "content_filter", "function_call"))
# Finish reasons of their own.
_OWN_REASONS = {
    "model_length": "length",
    "eos": "stop",
    "error": "stop",
    "insufficient_system_resource": "stop",
}
_DETAILS = "reasoning_details"
_PIECES = ("text", "summary", "data")  # of a detail, which a stream sends in pieces
_STATUS = re.compile("[45][0-9]{2}")


class ShapedReader:
    ended = False  # a stream ends with [DONE]

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._choices = StreamedChoices()
        self._usage: dict[str, Any] = {}
        self._is_new = False
        # By choice and index: what has come of a detail.
        self._details: dict[tuple[int, Any], dict[str, Any]] = {}

    def text(self, data: bytes) -> str:
        try:
            event = plain_event_decoder.decode(data)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return ""
        choices = event.choices
        if event.usage or (choices and choices[0].index) or self._choices.waiting:
            return ""
        if self._details or (self._dialect.details_back and _DETAILS.encode() in data):
            return ""
        return event.text

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        if event.get("error"):
            raise reported(event["error"])
        self._add_usage(event)
        said = []
        for choice in event.get("choices") or ():
            each = self._choices.read(choice)
            self._complete(each, choice.get("delta") or {})
            said += self._in_order(each, choice.get("delta") or {})
        return said

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        if answer.get("error"):
            raise reported(answer["error"])
        if not answer.get("choices"):
            raise ValueError("it has no choices")
        self._add_usage(answer)
        said = []
        for choice in answer["choices"]:
            each = whole_choice(choice)
            self._complete(each, choice.get("message") or {})
            each.reason = each.reason or "stop"
            said += self._in_order(each, choice.get("message") or {})
        return said

    def take_usage(self) -> Split | None:
        is_new, self._is_new = self._is_new, False
        return split_of_usage(self._usage, self._dialect) if is_new else None

    def _add_usage(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        for name in self._dialect.holder:
            held = event.get(name)
            usage = usage or (held.get("usage") if isinstance(held, dict) else None)
        if not usage:  # Moonshot's and some others' stands in the choice
            first: Any = next(iter(event.get("choices") or ()), None)
            usage = first.get("usage") if isinstance(first, dict) else None
        if isinstance(usage, dict) and usage:
            self._usage |= usage
            self._is_new = True

    def _in_order(self, said: Said, message: dict[str, Any]) -> list[Said]:
        """Reasoning with its details, which come in pieces, before the rest of an event."""
        if not self._dialect.details_back:
            return [said]
        for piece in checked(message.get(_DETAILS)):
            self._add_detail(said.index, piece)
        if not (said.text or said.calls or said.refusal or said.reason):
            return [said]
        held, self._details = self._details, {}
        mine = [detail for (index, _), detail in held.items() if index == said.index]
        self._details = {key: each for key, each in held.items() if key[0] != said.index}
        if not mine:
            return [said]
        reasoning, said.reasoning = said.reasoning, ""
        return [Said(said.index, reasoning=reasoning), Said(said.index, details=mine), said]

    def _add_detail(self, choice: int, piece: dict[str, Any]) -> None:
        known = self._details.setdefault((choice, piece.get("index")), {})
        for name, value in piece.items():
            if name in _PIECES and isinstance(value, str):
                value = (known.get(name) or "") + value
            if value is not None or name not in known:
                known[name] = value

    def _complete(self, said: Said, message: dict[str, Any]) -> None:
        if said.reason is not None and said.reason not in _REASONS:
            said.reason = _OWN_REASONS.get(said.reason, "stop")
        if isinstance(notes := message.get("annotations"), list) and notes:
            said.annotations = [each for each in notes if isinstance(each, dict)]


def reported(error: Any) -> ReportedError:
    code = error.get("code") if isinstance(error, dict) else None
    text = str(code)
    return ReportedError(int(text) if _STATUS.fullmatch(text) else 500, error)
