"""Reads Cohere's answers, whole or by events."""

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.engines.answer_fields import Said
from gateway.engines.ports.cohere.request import FORMAT
from gateway.engines.ports.cohere.usage import split_of_usage
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.split import Split
from gateway.engines.ports.tool_text import arguments_text

log = logging.getLogger("tollhouse.upstream")
REASONS = {
    "COMPLETE": "stop",
    "STOP_SEQUENCE": "stop",
    "MAX_TOKENS": "length",
    "TOOL_CALL": "tool_calls",
    "ERROR_TOXIC": "content_filter",
    "ERROR_LIMIT": "length",
}
_FAILED = {"ERROR": 500, "TIMEOUT": 504}
_KNOWN = ("message-start", "content-end", "tool-call-end", "citation-end", "debug")


class _Content(msgspec.Struct):
    text: str


class _Message(msgspec.Struct):
    content: _Content


class _Delta(msgspec.Struct):
    message: _Message


class _TextEvent(msgspec.Struct):
    type: str
    delta: _Delta


_text_decoder = msgspec.json.Decoder(_TextEvent)


class CohereReader:
    ended = False
    _is_new = False

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._calls = 0
        self._written = False  # the last call has arguments
        self._plan: list[str] = []

    def text(self, data: bytes) -> str:
        try:
            event = _text_decoder.decode(data)
        except (ValueError, msgspec.MsgspecError):
            return ""
        return event.delta.message.content.text if event.type == "content-delta" else ""

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        kind = event.get("type")
        delta = event.get("delta") or {}
        message = delta.get("message") or {}
        if kind in ("content-start", "content-delta"):
            return [*self._end_plan(), *_content(message.get("content") or {})]
        if kind == "tool-plan-delta":
            self._plan.append(str(message.get("tool_plan") or ""))
            return [Said(reasoning=self._plan[-1])]
        if kind == "tool-call-start":
            return [*self._end_plan(), *self._start(message["tool_calls"])]
        if kind == "tool-call-delta":
            text = message["tool_calls"]["function"].get("arguments") or ""
            return [self._arguments(text)] if text else []
        if kind == "tool-call-end" and not self._written and self._calls:
            return [self._arguments("{}")]
        if kind == "citation-start":
            cited = message.get("citations")
            return [Said(annotations=[_citation(cited)])] if isinstance(cited, dict) else []
        if kind == "message-end":
            self.ended = True
            self._add_usage(delta.get("usage"))
            return [_ending(delta.get("finish_reason"), delta.get("error"))]
        if kind is None and isinstance(event.get("message"), str):
            raise ReportedError(500, event)
        if kind not in _KNOWN:
            log.warning("an event of the unknown type %r is left out", str(kind)[:80])
        return []

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        message = answer["message"]
        if isinstance(message, str):
            raise ReportedError(500, answer)
        self._add_usage(answer.get("usage"))
        if plan := message.get("tool_plan"):
            self._plan.append(str(plan))
            yield Said(reasoning=str(plan))
            yield from self._end_plan()
        for part in message.get("content") or ():
            yield from _content(part)
        for call in message.get("tool_calls") or ():
            yield from self._start({**call, "function": {**call["function"], "arguments": ""}})
            yield self._arguments(arguments_text(call["function"].get("arguments")))
        if notes := [_citation(each) for each in message.get("citations") or ()]:
            yield Said(annotations=notes)
        yield _ending(answer.get("finish_reason"), None)

    def take_usage(self) -> Split | None:
        is_new, self._is_new = self._is_new, False
        return split_of_usage(self._usage) if is_new else None

    def _add_usage(self, usage: Any) -> None:
        if isinstance(usage, dict) and usage:
            self._usage |= usage
            self._is_new = True

    def _end_plan(self) -> list[Said]:
        plan, self._plan = "".join(self._plan), []
        if not plan:
            return []
        return [Said(details=[{"type": "reasoning.text", "text": plan, "format": FORMAT}])]

    def _start(self, call: dict[str, Any]) -> list[Said]:
        self._calls, self._written = self._calls + 1, False
        function = {"name": str(call["function"]["name"]), "arguments": ""}
        piece = {"index": self._calls - 1, "id": str(call.get("id") or ""), "type": "function"}
        begun = [Said(calls=[{**piece, "function": function}])]
        text = call["function"].get("arguments")
        return [*begun, self._arguments(text)] if text else begun

    def _arguments(self, text: str) -> Said:
        self._written = True
        return Said(calls=[{"index": self._calls - 1, "function": {"arguments": text}}])


def _content(content: Any) -> list[Said]:
    if isinstance(content, str):
        return [Said(text=content)] if content else []
    said = []
    if text := content.get("text"):
        said.append(Said(text=str(text)))
    if thought := content.get("thinking"):
        said.append(Said(reasoning=str(thought)))
    return said


def _ending(reason: Any, error: Any) -> Said:
    if reason in _FAILED:
        raise ReportedError(_FAILED[reason], error or {"message": f"it ended with {reason}"})
    if reason not in REASONS:
        log.warning("the unknown finish reason %r is taken for an end", str(reason)[:80])
    return Said(reason=REASONS.get(str(reason), "stop"))


def _citation(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "document_citation", "cohere": given}
