"""/v1/messages: answers, stream events, usage and errors in Anthropic's shapes.

Anthropic's `input_tokens` excludes what was read from the cache.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson

from core.errors import InsufficientQuota, TollhouseError
from gateway.ask import Ask, Usage
from gateway.schemas.messages import ROUTE, parse_messages
from gateway.streaming import ChoiceOutput, Delta
from gateway.surface import Head

_ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal", "stop": "end_turn"}


class MessagesSurface:
    route = ROUTE
    style = "anthropic"

    def parse(self, raw: bytes) -> Ask:
        return parse_messages(raw)

    def stream(self, head: Head, ask: Ask) -> "MessageStream":
        return MessageStream(head)

    def answer(
        self, head: Head, ask: Ask, choices: Sequence[ChoiceOutput], usage: Usage
    ) -> dict[str, Any]:
        choice = choices[0]
        return _message(head, ["".join(choice.text)], _ending(choice), usage)

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return anthropic_error(error, request_id)


class MessageStream:
    def __init__(self, head: Head) -> None:
        self._head = head

    def begin(self) -> bytes:
        # Provisional: message_delta is what counts.
        usage = Usage(self._head.prompt_tokens, 0, 0)
        message = _message(self._head, [], (None, None), usage)
        block = {"type": "text", "text": ""}
        return (
            _event({"type": "message_start", "message": message})
            + _event({"type": "content_block_start", "index": 0, "content_block": block})
            + _event({"type": "ping"})
        )

    def delta(self, delta: Delta) -> bytes:
        if not delta.text:
            return b""
        told = {"type": "text_delta", "text": delta.text}
        return _event({"type": "content_block_delta", "index": 0, "delta": told})

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        reason, sequence = _ending(choices[0])
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": ended, "usage": usage_object(usage)})
            + _event({"type": "message_stop"})
        )

    def failed(self, error: TollhouseError) -> bytes:
        return _event(anthropic_error(error, self._head.request_id))


def anthropic_error(error: TollhouseError, request_id: str) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(HTTPStatus(error.status), "api_error")
    if isinstance(error, InsufficientQuota):
        kind = "billing_error"
    return {
        "type": "error",
        "error": {"type": kind, "message": str(error)},
        "request_id": request_id,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output,
    }


def _message(
    head: Head, texts: list[str], ending: tuple[str | None, str | None], usage: Usage
) -> dict[str, Any]:
    return {
        "id": f"msg_{head.request_id.rpartition('_')[2]}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [{"type": "text", "text": text} for text in texts],
        "stop_reason": ending[0],
        "stop_sequence": ending[1],
        "usage": usage_object(usage),
    }


def _ending(choice: ChoiceOutput) -> tuple[str, str | None]:
    if choice.stop_matched is not None:
        return "stop_sequence", choice.stop_matched
    return _STOP_REASONS.get(choice.finish_reason or "stop", "end_turn"), None


def _event(body: dict[str, Any]) -> bytes:
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
