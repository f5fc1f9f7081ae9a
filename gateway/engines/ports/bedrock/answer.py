"""Reads Converse's answers, whole or by the events of its stream."""

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.engines.answer_fields import Said
from gateway.engines.ports.bedrock.usage import split_of_usage
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.split import Split
from gateway.engines.ports.tool_text import arguments_text
from gateway.request.thoughts import ANTHROPIC, encrypted, thought

log = logging.getLogger("tollhouse.upstream")
REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "guardrail_intervened": "content_filter",
    "content_filtered": "content_filter",
    "malformed_model_output": "stop",
    "malformed_tool_use": "stop",
    "refusal": "content_filter",
}
_STATUSES = {
    "validationException": 400,
    "throttlingException": 429,
    "modelStreamErrorException": 500,
    "internalServerException": 500,
    "serviceUnavailableException": 503,
    "modelTimeoutException": 504,
}
_SILENT = frozenset(("messageStart",))


class _Delta(msgspec.Struct):
    text: str


class _Block(msgspec.Struct):
    delta: _Delta


class _TextEvent(msgspec.Struct):
    contentBlockDelta: _Block


_text_decoder = msgspec.json.Decoder(_TextEvent)


class _Thought(msgspec.Struct):
    texts: list[str] = []
    signature: str = ""


class ConverseReader:
    ended = False
    _is_new = False

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._calls: dict[int, int] = {}  # number of the call by the block's
        self._written: set[int] = set()  # calls that have arguments
        self._thoughts: dict[int, _Thought] = {}

    def text(self, data: bytes) -> str:
        try:
            return _text_decoder.decode(data).contentBlockDelta.delta.text
        except (ValueError, msgspec.MsgspecError):
            return ""

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        said: list[Said] = []
        for kind, held in event.items():
            if kind == "contentBlockDelta":
                said += self._delta(int(held.get("contentBlockIndex") or 0), held["delta"])
            elif kind == "contentBlockStart":
                said += self._start(
                    int(held.get("contentBlockIndex") or 0), held.get("start") or {}
                )
            elif kind == "contentBlockStop":
                said += self._stop(int(held.get("contentBlockIndex") or 0))
            elif kind == "messageStop":
                said.append(ending(held.get("stopReason")))
            elif kind == "metadata":
                self._add_usage(held.get("usage"))
                self.ended = True
            elif kind in _STATUSES or kind.endswith("Exception"):
                raise ReportedError(_STATUSES.get(kind, 500), held)
            elif kind not in _SILENT:
                log.warning("an event of the unknown type %r is left out", kind[:80])
        return said

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        if "output" not in answer and isinstance(answer.get("message"), str):
            raise ReportedError(500, answer)
        content = answer["output"]["message"]["content"]
        self._add_usage(answer.get("usage"))
        for index, block in enumerate(content):
            yield from self._block(index, block)
        yield ending(answer.get("stopReason") or "end_turn")

    def take_usage(self) -> Split | None:
        is_new, self._is_new = self._is_new, False
        return split_of_usage(self._usage) if is_new else None

    def _add_usage(self, usage: Any) -> None:
        if isinstance(usage, dict) and usage:
            self._usage |= usage
            self._is_new = True

    def _block(self, index: int, block: dict[str, Any]) -> Iterable[Said]:
        if isinstance(text := block.get("text"), str):
            yield Said(text=text)
        elif (used := block.get("toolUse")) is not None:
            if begun := self._start(index, {"toolUse": used}):
                yield from [*begun, self._arguments(index, arguments_text(used.get("input")))]
        elif (held := block.get("reasoningContent")) is not None:
            yield from self._delta(index, {"reasoningContent": held.get("reasoningText") or held})
            yield from self._stop(index)
        elif (cited := block.get("citationsContent")) is not None:
            text = "".join([str(each.get("text") or "") for each in cited.get("content") or ()])
            yield Said(text=text, annotations=[_citation(c) for c in cited.get("citations") or ()])
        else:
            log.info("a block of the type %r is left out", next(iter(block), "")[:80])

    def _start(self, index: int, start: dict[str, Any]) -> list[Said]:
        used = start.get("toolUse")
        if used is None or used.get("type") == "server_tool_use":
            return []
        number = self._calls[index] = len(self._calls)
        function = {"name": str(used["name"]), "arguments": ""}
        piece = {"index": number, "id": str(used["toolUseId"]), "type": "function"}
        return [Said(calls=[{**piece, "function": function}])]

    def _delta(self, index: int, delta: dict[str, Any]) -> list[Said]:
        if isinstance(text := delta.get("text"), str):
            return [Said(text=text)] if text else []
        if (used := delta.get("toolUse")) is not None and index in self._calls:
            piece = used.get("input") or ""
            return [self._arguments(index, piece)] if piece else []
        if (held := delta.get("reasoningContent")) is not None:
            return self._think(index, held)
        if (cited := delta.get("citation")) is not None:
            return [Said(annotations=[_citation(cited)])]
        return []

    def _think(self, index: int, held: dict[str, Any]) -> list[Said]:
        if (data := held.get("redactedContent")) is not None:
            return [Said(details=[encrypted(str(data), ANTHROPIC)])]
        known = self._thoughts.setdefault(index, _Thought())
        known.signature += held.get("signature") or ""
        text = held.get("text") or ""
        known.texts.append(text)
        return [Said(reasoning=text)] if text else []

    def _stop(self, index: int) -> list[Said]:
        if index in self._calls and index not in self._written:  # a call without arguments
            return [self._arguments(index, "{}")]
        known = self._thoughts.pop(index, None)
        if known is None or not known.signature:
            return []
        return [Said(details=[thought("".join(known.texts), known.signature, ANTHROPIC)])]

    def _arguments(self, index: int, text: str) -> Said:
        self._written.add(index)
        return Said(calls=[{"index": self._calls[index], "function": {"arguments": text}}])


def ending(reason: Any) -> Said:
    if reason not in REASONS:
        log.warning("the unknown stop reason %r is taken for an end", str(reason)[:80])
    return Said(reason=REASONS.get(str(reason), "stop"))


def _citation(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "document_citation", "bedrock": given}
