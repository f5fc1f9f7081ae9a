"""/v1/messages: responses, stream events, usage and errors in Anthropic's format.

Anthropic's `input_tokens` excludes tokens read from the cache.
"""

import json
from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import (
    TollhouseError,
)
from gateway.answers.choices import ChoiceOutput, Delta
from gateway.answers.reasoning import marks_reasoning
from gateway.answers.surface import ResponseInfo
from gateway.answers.tool_calls import ToolCall
from gateway.edge.anthropic_errors import ROUTE, anthropic_error
from gateway.formats.messages.request import parse_messages
from gateway.request.inference import InferenceRequest, Usage

_STOP_REASONS = {
    "length": "max_tokens",
    "content_filter": "refusal",
    "stop": "end_turn",
    "tool_calls": "tool_use",
}
_SIGNATURE = "dG9sbGhvdXNl"  # opaque, as Anthropic's are


class MessagesSurface:
    route = ROUTE
    style = "anthropic"

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_messages(raw)

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> "MessageStream":
        thinks = info.codec is None or marks_reasoning(info.codec)
        return MessageStream(info, tools=bool(request.tools) or thinks)

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        choice = choices[0]
        text = "".join(choice.text)
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append(_thinking("".join(choice.reasoning)))
        if text or not (choice.calls or choice.reasoning):
            content.append({"type": "text", "text": text})
        content += [{**_call(each), "input": _input(each)} for each in choice.calls]
        return _message(info, content, _ending(choice), usage)

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return anthropic_error(error, request_id)


class MessageStream:
    """Blocks are numbered from 0. With tools or reasoning, the type of the first is unknown until it
    arrives."""

    def __init__(self, info: ResponseInfo, *, tools: bool = False) -> None:
        self._info = info
        self._defer_first_block = tools
        self._block = 0
        self._open = False
        self._thinking = False  # whether the open block is the model's reasoning

    def begin(self) -> bytes:
        # Provisional; the final usage is in message_delta.
        usage = Usage(self._info.prompt_tokens, 0, 0)
        message = _message(self._info, [], (None, None), usage)
        started = _event({"type": "message_start", "message": message})
        return (
            started
            + (b"" if self._defer_first_block else self._open_block())
            + _event({"type": "ping"})
        )

    def delta(self, delta: Delta) -> bytes:
        parts = []
        if delta.reasoning:
            if self._open and not self._thinking:
                parts.append(self._close_block())
            if not self._open:
                parts.append(self._start_block({**_thinking(""), "signature": ""}))
                self._thinking = True
            thought = {"type": "thinking_delta", "thinking": delta.reasoning}
            parts.append(self._block_delta(thought))
        if delta.text:
            if self._thinking:
                parts.append(self._close_block())
            if not self._open:
                parts.append(self._open_block())
            parts.append(self._block_delta({"type": "text_delta", "text": delta.text}))
        for call in delta.calls:
            parts.append(self._close_block())
            parts.append(self._start_block({**_call(call), "input": {}}))
            parts.append(
                self._block_delta({"type": "input_json_delta", "partial_json": call.arguments})
            )
            parts.append(self._close_block())
        return b"".join(parts)

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        reason, sequence = _ending(choices[0])
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        if self._block == 0 and not self._open:
            before = self._open_block() + self._close_block()
        else:
            before = self._close_block()
        return (
            before
            + _event({"type": "message_delta", "delta": ended, "usage": usage_object(usage)})
            + _event({"type": "message_stop"})
        )

    def _open_block(self) -> bytes:
        return self._start_block({"type": "text", "text": ""})

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self._open = True
        return _event({"type": "content_block_start", "index": self._block, "content_block": block})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._thinking:
            signed = self._block_delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = self._thinking = False
        self._block += 1
        return signed + _event({"type": "content_block_stop", "index": self._block - 1})

    def failed(self, error: TollhouseError) -> bytes:
        return _event(anthropic_error(error, self._info.request_id))


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output,
        "service_tier": "standard",
    }


def _message(
    info: ResponseInfo,
    content: list[dict[str, Any]],
    ending: tuple[str | None, str | None],
    usage: Usage,
) -> dict[str, Any]:
    return {
        "id": f"msg_{info.request_id.rpartition('_')[2]}",
        "type": "message",
        "role": "assistant",
        "model": info.model,
        "content": content,
        "stop_reason": ending[0],
        "stop_sequence": ending[1],
        "usage": usage_object(usage),
    }


def _thinking(text: str) -> dict[str, Any]:
    """Clients drop a block without a signature, or send its text as the prompt's. Ours is opaque, and
    is not verified when the block comes back."""
    return {"type": "thinking", "thinking": text, "signature": _SIGNATURE}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_", 1), "name": call.name}


def _input(call: ToolCall) -> Any:
    """Empty for a call that was cut, whose arguments are the beginning of an object."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return {}


def _ending(choice: ChoiceOutput) -> tuple[str, str | None]:
    if choice.stop_matched is not None:
        return "stop_sequence", choice.stop_matched
    if choice.refused:
        return "refusal", None
    return _STOP_REASONS.get(choice.finish_reason or "stop", "end_turn"), None


def _event(body: dict[str, Any]) -> bytes:
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
