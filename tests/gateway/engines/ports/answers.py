"""One answer as each provider writes it, whole and as a stream, made by hand from their references."""

import base64
import binascii
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.provider_server import SSE, Said, named_events, pieces, plain_events, whole

THOUGHT, TEXT, SIGNATURE = "Two cities.", "I look at both.", "c2lnbmVkL2J5PT0="
CALLS = (("k1x", {"city": "Bern"}), ("k2x", {"city": "Köln"}))
FRAMES = "application/vnd.amazon.eventstream"


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


_WRITTEN = Usage(written=20)
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
