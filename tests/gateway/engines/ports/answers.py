"""One answer as each provider writes it, whole and as a stream, made by hand from their references."""

import base64
import binascii
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.deployment import Deployment
from tests.gateway.provider_server import SSE, Said, named_events, pieces, plain_events, whole

THOUGHT, TEXT, SIGNATURE = "Two cities.", "I look at both.", "c2lnbmVkL2J5PT0="
CALLS = (("k1x", {"city": "Bern"}), ("k2x", {"city": "Köln"}))
FRAMES = "application/vnd.amazon.eventstream"


def end_rest(gateway: Deployment, model: str) -> None:
    """The keys of the model's providers may be used again, though a provider named a time."""
    for replica in gateway.services.pipeline.router.of(model):
        replica.client._learned._group += "+"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Usage:
    """What each answer's report stands for."""

    prompt: int = 132
    read: int = 100
    written: int = 0
    output: int = 40
    reasoning: int = 0


@dataclass(frozen=True)
class Made:
    """A provider, as far as tests differ."""

    name: str
    model: str
    whole: Callable[[bool], Said]  # with calls or text alone
    stream: Callable[[bool, int], Said]  # the same in writes of so many bytes
    usage: Usage = Usage()
    options: dict[str, str] = field(default_factory=dict)
    reasons: bool = True  # it returns reasoning
    signs: bool = True  # and wants it back
    overloaded: Said = field(default_factory=lambda: whole({"error": {"message": "busy"}}, 503))


def gemini_parts(calls: bool) -> list[dict[str, Any]]:
    if not calls:
        return [{"text": TEXT[:6]}, {"text": TEXT[6:]}]
    listed: list[dict[str, Any]] = [{"text": THOUGHT, "thought": True}, {"text": TEXT}]
    for number, (name, arguments) in enumerate(CALLS):
        call = {"functionCall": {"name": "weather", "args": arguments, "id": name}}
        listed.append(call if number else {**call, "thoughtSignature": SIGNATURE})
    return listed


GEMINI_USAGE = {
    "promptTokenCount": 132,
    "cachedContentTokenCount": 100,
    "candidatesTokenCount": 28,
    "thoughtsTokenCount": 12,
    "totalTokenCount": 172,
}


def gemini(
    parts: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if reason:
        candidate["finishReason"] = reason
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-x"}


def gemini_stream(calls: bool, size: int) -> Said:
    early = {"promptTokenCount": 132, "cachedContentTokenCount": 100, "candidatesTokenCount": 3}
    listed = [gemini([part], None, early) for part in gemini_parts(calls)]
    return plain_events([*listed, gemini([{"text": ""}], "STOP", GEMINI_USAGE)], size)


def converse_content(calls: bool) -> list[dict[str, Any]]:
    if not calls:
        return [{"text": TEXT}]
    thought = {"reasoningText": {"text": THOUGHT, "signature": SIGNATURE}}
    used = [{"toolUse": {"toolUseId": i, "name": "weather", "input": a}} for i, a in CALLS]
    return [{"reasoningContent": thought}, {"text": TEXT}, *used]


CONVERSE_USAGE = {
    "inputTokens": 12,
    "outputTokens": 40,
    "totalTokens": 172,
    "cacheReadInputTokens": 100,
    "cacheWriteInputTokens": 20,
    "cacheDetails": [{"ttl": "1h", "inputTokens": 5}, {"ttl": "5m", "inputTokens": 15}],
}


def converse(calls: bool) -> Said:
    message = {"role": "assistant", "content": converse_content(calls)}
    reason = "tool_use" if calls else "end_turn"
    return whole({"output": {"message": message}, "stopReason": reason, "usage": CONVERSE_USAGE})


def frame(name: str, payload: dict[str, Any], kind: str = "event") -> bytes:
    """A frame of AWS's event streams, by its specification: prelude, headers, payload and two CRCs."""
    named = {":message-type": kind, ":content-type": "application/json"}
    named[":event-type" if kind == "event" else ":exception-type"] = name
    headers = b"".join(
        bytes([len(key)]) + key.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for key, value in named.items()
    )
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", 16 + len(headers) + len(body), len(headers))
    begun = prelude + struct.pack(">I", binascii.crc32(prelude)) + headers + body
    return begun + struct.pack(">I", binascii.crc32(begun))


def converse_frames(calls: bool) -> list[bytes]:
    listed = [frame("messageStart", {"role": "assistant"})]
    for index, block in enumerate(converse_content(calls)):
        place = {"contentBlockIndex": index}
        if "text" in block:
            for text in (TEXT[:4], TEXT[4:]):
                listed.append(frame("contentBlockDelta", {**place, "delta": {"text": text}}))
        elif "reasoningContent" in block:
            for delta in ({"text": THOUGHT}, {"signature": SIGNATURE}):
                held = {"delta": {"reasoningContent": delta}}
                listed.append(frame("contentBlockDelta", {**place, **held}))
        else:
            used = block["toolUse"]
            start = {"toolUse": {k: used[k] for k in ("toolUseId", "name")}}
            listed.append(frame("contentBlockStart", {**place, "start": start}))
            written = json.dumps(used["input"])
            for piece in (written[:4], written[4:]):
                listed.append(
                    frame("contentBlockDelta", {**place, "delta": {"toolUse": {"input": piece}}})
                )
        listed.append(frame("contentBlockStop", place))
    listed.append(frame("messageStop", {"stopReason": "tool_use" if calls else "end_turn"}))
    return [*listed, frame("metadata", {"usage": CONVERSE_USAGE, "metrics": {"latencyMs": 1}})]


def converse_stream(calls: bool, size: int) -> Said:
    return Said(pieces(b"".join(converse_frames(calls)), size), FRAMES)


MESSAGES_USAGE = {
    "input_tokens": 12,
    "cache_read_input_tokens": 100,
    "cache_creation_input_tokens": 20,
    "cache_creation": {"ephemeral_5m_input_tokens": 15, "ephemeral_1h_input_tokens": 5},
    "output_tokens": 40,
}


def messages_content(calls: bool) -> list[dict[str, Any]]:
    if not calls:
        return [{"type": "text", "text": TEXT}]
    used = [{"type": "tool_use", "id": i, "name": "weather", "input": a} for i, a in CALLS]
    thought = {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE}
    return [thought, {"type": "text", "text": TEXT}, *used]


def messages(calls: bool) -> Said:
    reason = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    head = {"id": "m", "type": "message", "role": "assistant", "model": "c"}
    return whole({**head, "content": messages_content(calls), **reason, "usage": MESSAGES_USAGE})


def messages_stream(calls: bool, size: int) -> Said:
    begun = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [],
        "usage": MESSAGES_USAGE,
    }
    listed: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(messages_content(calls)):
        empty: dict[str, Any] = {"type": block["type"]}
        if block["type"] == "text":
            empty["text"] = ""
            deltas = [{"type": "text_delta", "text": each} for each in (TEXT[:4], TEXT[4:])]
        elif block["type"] == "thinking":
            empty |= {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": THOUGHT},
                {"type": "signature_delta", "signature": SIGNATURE},
            ]
        else:
            empty |= {"id": block["id"], "name": block["name"], "input": {}}
            text = json.dumps(block["input"])
            deltas = [{"type": "input_json_delta", "partial_json": e} for e in (text[:4], text[4:])]
        listed.append({"type": "content_block_start", "index": index, "content_block": empty})
        listed += [{"type": "content_block_delta", "index": index, "delta": e} for e in deltas]
        listed.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    listed.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 40}})
    return named_events([*listed, {"type": "message_stop"}], size)


SHAPED_USAGE = {
    "prompt_tokens": 132,
    "completion_tokens": 40,
    "total_tokens": 172,
    "prompt_tokens_details": {"cached_tokens": 100},
    "completion_tokens_details": {"reasoning_tokens": 12},
}
DEEPSEEK_USAGE = {
    "prompt_tokens": 132,
    "completion_tokens": 40,
    "total_tokens": 172,
    "prompt_cache_hit_tokens": 100,
    "prompt_cache_miss_tokens": 32,
    "completion_tokens_details": {"reasoning_tokens": 12},
}
XAI_USAGE = {
    **SHAPED_USAGE,
    "completion_tokens": 28,
    "total_tokens": 172,
}
MISTRAL_USAGE = {
    "prompt_tokens": 132,
    "completion_tokens": 40,
    "total_tokens": 172,
    "num_cached_tokens": 100,
}


def shaped(usage: dict[str, Any], signed: bool) -> tuple[Any, Any]:
    """(whole, stream) of a provider of OpenAI's form; `signed`: with OpenRouter's details."""

    def _message(calls: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": TEXT}
        if not calls:
            return message
        function = [
            {"name": "weather", "arguments": json.dumps(a, ensure_ascii=False)} for _, a in CALLS
        ]
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": f}
            for (i, _), f in zip(CALLS, function, strict=True)
        ]
        message["reasoning"] = THOUGHT
        if signed:
            form = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
            held = {**form, "text": THOUGHT, "signature": SIGNATURE}
            message["reasoning_details"] = [held]
        return message

    def _whole(calls: bool) -> Said:
        reason = "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": _message(calls), "finish_reason": reason}
        return whole({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})

    def _stream(calls: bool, size: int) -> Said:
        message = _message(calls)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if calls:
            deltas.append({"reasoning": THOUGHT})
            if signed:
                deltas.append({"reasoning_details": message["reasoning_details"]})
        deltas += [{"content": TEXT[:4]}, {"content": TEXT[4:]}]
        for number, call in enumerate(message.get("tool_calls") or ()):
            text = call["function"]["arguments"]
            begun = {**call, "index": number, "function": {"name": "weather", "arguments": ""}}
            deltas.append({"tool_calls": [begun]})
            for piece in (text[:4], text[4:]):
                deltas.append({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
        listed = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        reason = "tool_calls" if calls else "stop"
        listed.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        return plain_events([*listed, {"choices": [], "usage": usage}], size, done=True)

    return _whole, _stream


def responses_output(calls: bool) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": TEXT, "annotations": []}
    message = {"type": "message", "id": "m1", "role": "assistant", "content": [part]}
    if not calls:
        return [message]
    summary = [{"type": "summary_text", "text": THOUGHT}]
    thought = {
        "type": "reasoning",
        "id": "rs_9",
        "summary": summary,
        "encrypted_content": SIGNATURE,
    }
    used = [
        {
            "type": "function_call",
            "id": f"fc{i}",
            "call_id": i,
            "name": "weather",
            "arguments": json.dumps(a, ensure_ascii=False),
        }
        for i, a in CALLS
    ]
    return [thought, message, *used]


RESPONSES_USAGE = {
    "input_tokens": 132,
    "input_tokens_details": {"cached_tokens": 100},
    "output_tokens": 40,
    "output_tokens_details": {"reasoning_tokens": 12},
    "total_tokens": 172,
}


def response(calls: bool, status: str = "completed") -> dict[str, Any]:
    held = {"id": "r", "object": "response", "status": status, "error": None}
    return {**held, "output": responses_output(calls), "usage": RESPONSES_USAGE}


def responses_stream(calls: bool, size: int) -> Said:
    listed: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**response(calls, "in_progress"), "usage": None}}
    ]
    for place, item in enumerate(responses_output(calls)):
        at = {"output_index": place, "item_id": f"changes{place}"}
        if item["type"] == "message":
            for text in (TEXT[:4], TEXT[4:]):
                listed.append({"type": "response.output_text.delta", "delta": text, **at})
        elif item["type"] == "reasoning":
            kind = "response.reasoning_summary_text.delta"
            listed.append({"type": kind, "delta": THOUGHT, "summary_index": 0, **at})
        else:
            begun = {**item, "arguments": ""}
            listed.append({"type": "response.output_item.added", "item": begun, **at})
            for text in (item["arguments"][:4], item["arguments"][4:]):
                kind = "response.function_call_arguments.delta"
                listed.append({"type": kind, "delta": text, **at})
        listed.append({"type": "response.output_item.done", "item": item, **at})
    listed.append({"type": "response.completed", "response": response(calls)})
    return named_events(listed, size)


COHERE_USAGE = {
    "billed_units": {"input_tokens": 132, "output_tokens": 40},
    "tokens": {"input_tokens": 1_000, "output_tokens": 60},
    "cached_tokens": 100,
}


def cohere(calls: bool) -> Said:
    message: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": TEXT}]}
    if calls:
        message["tool_plan"] = THOUGHT
        message["tool_calls"] = [
            {
                "id": i,
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(a, ensure_ascii=False)},
            }
            for i, a in CALLS
        ]
    reason = "TOOL_CALL" if calls else "COMPLETE"
    return whole({"id": "x", "finish_reason": reason, "message": message, "usage": COHERE_USAGE})


def cohere_stream(calls: bool, size: int) -> Said:
    def _event(kind: str, **message: Any) -> dict[str, Any]:
        return {"type": kind, "delta": {"message": message}}

    listed = [_event("message-start", role="assistant")]
    if calls:
        listed.append(_event("tool-plan-delta", tool_plan=THOUGHT))
    listed.append(_event("content-start", content={"type": "text", "text": ""}))
    listed += [_event("content-delta", content={"text": each}) for each in (TEXT[:4], TEXT[4:])]
    listed.append({"type": "content-end"})
    for call_id, arguments in CALLS if calls else ():
        begun = {
            "id": call_id,
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        }
        listed.append(_event("tool-call-start", tool_calls=begun))
        text = json.dumps(arguments, ensure_ascii=False)
        for piece in (text[:4], text[4:]):
            held = {"function": {"arguments": piece}}
            listed.append(_event("tool-call-delta", tool_calls=held))
        listed.append({"type": "tool-call-end"})
    reason = "TOOL_CALL" if calls else "COMPLETE"
    ending = {"finish_reason": reason, "usage": COHERE_USAGE}
    return named_events([*listed, {"type": "message-end", "delta": ending}], size)


_WRITTEN = Usage(written=20)
_SHAPED = {
    "openai": ("gpt-x", SHAPED_USAGE, {}),
    "azure": ("our deployment", SHAPED_USAGE, {"api_version": "2024-10-21"}),
    "mistral": ("mistral-large", MISTRAL_USAGE, {}),
    "groq": ("llama-x", SHAPED_USAGE, {}),
    "together": ("llama-y", SHAPED_USAGE, {}),
    "fireworks": ("llama-z", SHAPED_USAGE, {}),
    "deepseek": ("deepseek-chat", DEEPSEEK_USAGE, {}),
    "xai": ("grok-x", XAI_USAGE, {}),
    "openrouter": ("anthropic/claude-x", SHAPED_USAGE, {}),
}
_GOOGLE = {"project": "p", "location": "europe-west4"}
MADE = {
    each.name: each
    for each in (
        Made("anthropic", "claude-sonnet-4-6", messages, messages_stream, _WRITTEN),
        Made("vertex-anthropic", "claude-sonnet-4-6", messages, messages_stream, _WRITTEN, _GOOGLE),
        Made(
            "gemini",
            "gemini-3-pro",
            lambda calls: whole(gemini(gemini_parts(calls), "STOP", GEMINI_USAGE)),
            gemini_stream,
            Usage(reasoning=12),
        ),
        Made(
            "vertex",
            "gemini-2.5-flash",
            lambda calls: whole(gemini(gemini_parts(calls), "STOP", GEMINI_USAGE)),
            gemini_stream,
            Usage(reasoning=12),
            _GOOGLE,
        ),
        Made(
            "bedrock",
            "anthropic.claude-sonnet-4-6-v1:0",
            converse,
            converse_stream,
            _WRITTEN,
            {"region": "eu-west-1"},
        ),
        Made(
            "openai-responses",
            "gpt-y",
            lambda calls: whole(response(calls)),
            responses_stream,
            Usage(reasoning=12),
        ),
        Made("cohere", "command-x", cohere, cohere_stream, signs=False),
        *(
            Made(
                name,
                model,
                *shaped(usage, name == "openrouter"),
                usage=Usage(reasoning=12),
                options=options,
                signs=name == "openrouter",
            )
            for name, (model, usage, options) in _SHAPED.items()
        ),
    )
}
__all__ = [
    "CALLS",
    "FRAMES",
    "MADE",
    "SIGNATURE",
    "SSE",
    "TEXT",
    "THOUGHT",
    "Made",
    "base64",
    "frame",
]
