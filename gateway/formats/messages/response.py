"""/v1/messages: responses, stream events, usage and errors in Anthropic's format.

Anthropic's `input_tokens` excludes tokens read from the cache and written into it.
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
from gateway.edge.api_errors import ROUTE, anthropic_error
from gateway.formats.messages.request import parse_messages
from gateway.formats.messages.thinking import OWN_SIGNATURE
from gateway.request.inference import InferenceRequest, Usage
from gateway.request.thoughts import ANTHROPIC, pack

_STOP_REASONS = {
    "length": "max_tokens",
    "content_filter": "refusal",
    "stop": "end_turn",
    "tool_calls": "tool_use",
}


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
        content = [block for delta in choice.parts() for block in _blocks(delta)]
        if not content:
            content.append({"type": "text", "text": ""})
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
        for detail in delta.details:
            parts.append(self._sign(detail))
        if delta.text:
            if self._thinking:
                parts.append(self._close_block())
            if not self._open:
                parts.append(self._open_block())
            parts.append(self._block_delta({"type": "text_delta", "text": delta.text}))
        parts += self._cite(delta)
        for call in delta.calls:
            parts.append(self._close_block())
            parts.append(self._start_block({**_call(call), "input": {}}))
            parts.append(
                self._block_delta({"type": "input_json_delta", "partial_json": call.arguments})
            )
            parts.append(self._close_block())
        return b"".join(parts)

    def _sign(self, detail: dict[str, Any]) -> bytes:
        """The end of a thought that its provider signed, or a block for one whose text is not shown."""
        block = _signed(detail)
        if block["type"] == "thinking" and self._thinking:
            return self._close_block(block["signature"])
        closed = self._close_block()
        if block["type"] == "redacted_thinking":
            return closed + self._start_block(block) + self._close_block()
        started = self._start_block({**block, "thinking": "", "signature": ""})
        self._thinking = True
        if block["thinking"]:
            started += self._block_delta({"type": "thinking_delta", "thinking": block["thinking"]})
        return closed + started + self._close_block(block["signature"])

    def _cite(self, delta: Delta) -> list[bytes]:
        listed = [each["anthropic"] for each in delta.annotations if "anthropic" in each]
        if not listed:
            return []
        before = [] if self._open else [self._open_block()]
        return before + [
            self._block_delta({"type": "citations_delta", "citation": each}) for each in listed
        ]

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

    def _close_block(self, signature: str = OWN_SIGNATURE) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._thinking:
            signed = self._block_delta({"type": "signature_delta", "signature": signature})
        self._open = self._thinking = False
        self._block += 1
        return signed + _event({"type": "content_block_stop", "index": self._block - 1})

    def failed(self, error: TollhouseError) -> bytes:
        return _event(anthropic_error(error, self._info.request_id))


def usage_object(usage: Usage) -> dict[str, Any]:
    written = usage.cache_write + usage.cache_write_long
    shown = {
        "input_tokens": usage.prompt - usage.cached - written,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": written,
        "output_tokens": usage.output,
        "service_tier": "standard",
    }
    if written:
        shown["cache_creation"] = {
            "ephemeral_5m_input_tokens": usage.cache_write,
            "ephemeral_1h_input_tokens": usage.cache_write_long,
        }
    return shown


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


def _blocks(delta: Delta) -> list[dict[str, Any]]:
    """The blocks of an answer that is not streamed, of one part of it."""
    blocks = [_signed(each) for each in delta.details]
    if delta.reasoning and not any(each.get("thinking") for each in blocks):
        if blocks and blocks[0]["type"] == "thinking":  # of a provider that signs other things
            blocks[0] = {**blocks[0], "thinking": delta.reasoning}
        else:
            blocks.insert(0, _thinking(delta.reasoning))
    if delta.text:
        text: dict[str, Any] = {"type": "text", "text": delta.text}
        listed = [each["anthropic"] for each in delta.annotations if "anthropic" in each]
        blocks.append({**text, "citations": listed} if listed else text)
    return blocks + [{**_call(each), "input": _input(each)} for each in delta.calls]


def _signed(detail: dict[str, Any]) -> dict[str, Any]:
    """A thought as the provider's own block; another provider's is packed into its signature."""
    text = str(detail.get("text") or "")
    if detail.get("format") != ANTHROPIC:
        return {"type": "thinking", "thinking": text, "signature": pack([detail])}
    if detail["type"] == "reasoning.encrypted":
        return {"type": "redacted_thinking", "data": detail["data"]}
    return {"type": "thinking", "thinking": text, "signature": detail["signature"]}


def _thinking(text: str) -> dict[str, Any]:
    """Clients drop a block without a signature, or send its text as the prompt's. Ours is opaque, and
    is not verified when the block comes back."""
    return {"type": "thinking", "thinking": text, "signature": OWN_SIGNATURE}


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
