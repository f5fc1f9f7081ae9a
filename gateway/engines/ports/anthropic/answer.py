"""Reads Anthropic's answers, whole or by events.

Blocks that no request of ours asks for (those of the provider's own tools) say nothing.
"""

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.engines.answer_fields import Said
from gateway.engines.ports.anthropic.usage import merged, split_of_usage
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.split import Split
from gateway.engines.ports.tool_text import arguments_text
from gateway.request.thoughts import ANTHROPIC, encrypted, thought

log = logging.getLogger("tollhouse.upstream")
REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "compaction": "stop",
}
STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_SILENT = frozenset(("ping", "content_block_stop"))


class _Delta(msgspec.Struct):
    type: str
    text: str = ""


class _TextEvent(msgspec.Struct):
    type: str
    delta: _Delta


_text_decoder = msgspec.json.Decoder(_TextEvent)


class _Block(msgspec.Struct):
    """A block that has begun; its texts are kept where the end needs them whole."""

    type: str
    call: int = 0  # number of the tool call
    texts: list[str] = []
    signature: str = ""
    given: Any = None  # the input that a call began with
    pieces: int = 0


class MessagesReader:
    ended = False
    _is_new = False  # a report came since the last was taken
    _begun = False

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._blocks: dict[int, _Block] = {}
        self._calls = 0

    def text(self, data: bytes) -> str:
        try:
            event = _text_decoder.decode(data)
        except (ValueError, msgspec.MsgspecError):
            return ""
        is_text = event.type == "content_block_delta" and event.delta.type == "text_delta"
        return event.delta.text if is_text else ""

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        kind = event.get("type")
        if kind == "content_block_delta":
            return self._delta(event["index"], event["delta"])
        if kind == "content_block_start":
            return self._start(event["index"], event["content_block"])
        if kind == "content_block_stop":
            return self._stop(event["index"])
        if kind == "message_start":
            if not self._begun:  # some servers in between repeat it
                self._begun = True
                self._add_usage(event["message"].get("usage"))
        elif kind == "message_delta":
            self._add_usage(event.get("usage"))
            return [ending(event.get("delta") or {})]
        elif kind == "message_stop":
            self.ended = True
        elif kind == "error":
            raise reported(event.get("error"))
        elif kind not in _SILENT:
            log.warning("an event of the unknown type %r is left out", str(kind)[:80])
        return ()

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        if answer.get("type") == "error" or "error" in answer:
            raise reported(answer.get("error"))
        content = answer["content"]
        if not isinstance(content, list):
            raise TypeError("its content is not a list")
        self._add_usage(answer.get("usage"))
        for index, block in enumerate(content):
            yield from self._start(index, block)
            yield from self._stop(index)
        self.ended = True
        yield ending(answer)

    def take_usage(self) -> Split | None:
        is_new, self._is_new = self._is_new, False
        return split_of_usage(self._usage) if is_new else None

    def _add_usage(self, usage: Any) -> None:
        self._usage = merged(self._usage, usage)
        self._is_new |= bool(self._usage)

    def _start(self, index: int, block: dict[str, Any]) -> list[Said]:
        kind = str(block.get("type"))
        self._blocks[index] = known = _Block(kind)
        if kind == "text":
            notes = [found for each in block.get("citations") or () if (found := citation(each))]
            text = block.get("text") or ""
            return [Said(text=text, annotations=notes)] if text or notes else []
        if kind == "thinking":
            text = block.get("thinking") or ""
            known.texts, known.signature = [text], block.get("signature") or ""
            return [Said(reasoning=text)] if text else []
        if kind == "redacted_thinking":
            return [Said(details=[encrypted(block.get("data") or "", ANTHROPIC)])]
        if kind == "tool_use":
            known.call, self._calls = self._calls, self._calls + 1
            known.given = block.get("input")
            function = {"name": str(block["name"]), "arguments": ""}
            piece = {"index": known.call, "id": str(block["id"]), "type": "function"}
            return [Said(calls=[{**piece, "function": function}])]
        log.info("a block of the type %r is left out", kind[:80])
        return []

    def _delta(self, index: int, delta: dict[str, Any]) -> list[Said]:
        kind, known = delta.get("type"), self._blocks.get(index)
        if kind == "text_delta":
            return [Said(text=delta["text"])] if delta["text"] else []
        if known is None:
            return []
        if kind == "input_json_delta" and known.type == "tool_use":
            piece = delta.get("partial_json") or ""
            known.pieces += len(piece)
            return [_arguments(known.call, piece)] if piece else []
        if kind == "thinking_delta":
            text = delta.get("thinking") or ""
            known.texts.append(text)
            return [Said(reasoning=text)] if text else []
        if kind == "signature_delta":
            known.signature += delta.get("signature") or ""
        elif kind == "citations_delta" and (found := citation(delta.get("citation"))):
            return [Said(annotations=[found])]
        return []

    def _stop(self, index: int) -> list[Said]:
        known = self._blocks.pop(index, None)
        if known is None:
            return []
        if known.type == "thinking":
            text = "".join(known.texts)
            known.texts = []
            return (
                [Said(details=[thought(text, known.signature, ANTHROPIC)])]
                if known.signature
                else []
            )
        if known.type == "tool_use" and not known.pieces:  # whole, or a call without arguments
            return [_arguments(known.call, arguments_text(known.given))]
        return []


def _arguments(call: int, text: str) -> Said:
    return Said(calls=[{"index": call, "function": {"arguments": text}}])


def ending(holder: dict[str, Any]) -> Said:
    reason = holder.get("stop_reason")
    known = REASONS.get(str(reason), "stop") if reason is not None else None
    if reason is not None and reason not in REASONS:
        log.warning("the unknown stop reason %r is taken for an end", str(reason)[:80])
    sequence = holder.get("stop_sequence")
    return Said(reason=known, stop=sequence if isinstance(sequence, str) else None)


def citation(given: Any) -> dict[str, Any] | None:
    """Anthropic's object, under the name of a citation of its own kind; a web page's as OpenAI's."""
    if not isinstance(given, dict):
        return None
    if given.get("type") == "web_search_result_location":
        page = {"url": str(given.get("url") or ""), "title": str(given.get("title") or "")}
        return {"type": "url_citation", "url_citation": page, "anthropic": given}
    return {"type": "document_citation", "anthropic": given}


def reported(error: Any) -> ReportedError:
    kind = error.get("type") if isinstance(error, dict) else None
    return ReportedError(STATUSES.get(str(kind), 500), error)
