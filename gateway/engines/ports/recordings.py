"""Reads a recorded answer by the reader of its port, without a connection: for checks and for support.

A recording is a whole answer in JSON, or a stream: server-sent events, events in JSON one a line or in a
list, or AWS's binary frames, also in base64.
"""

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from core.errors import BadRequest
from gateway.engines.answer_fields import Said
from gateway.engines.ports.anthropic.answer import MessagesReader
from gateway.engines.ports.bedrock.answer import ConverseReader
from gateway.engines.ports.cohere.answer import CohereReader
from gateway.engines.ports.gemini.answer import GeminiReader
from gateway.engines.ports.port import Reader
from gateway.engines.ports.responses.answer import ResponseReader
from gateway.engines.ports.shaped.answer import ShapedReader
from gateway.engines.ports.shaped.dialects import DIALECTS
from gateway.engines.ports.split import Split
from gateway.engines.server_events import DONE, EventReader, data_of, loads

_OWN: Mapping[str, type[Reader]] = MappingProxyType(
    {
        "anthropic": MessagesReader,
        "bedrock": ConverseReader,
        "cohere": CohereReader,
        "gemini": GeminiReader,
        "vertex": GeminiReader,
        "openai-responses": ResponseReader,
        "vertex-anthropic": MessagesReader,
    }
)
NAMES = (*_OWN, *DIALECTS)
_LONGEST = 64 << 20  # bytes of an event
_PRELUDE = struct.Struct(">III")  # length of a frame and of its headers, and their CRC


class Recorded(Struct):
    """What an answer says, of its first choice."""

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # id, name, arguments as text
    reason: str | None = None  # in OpenAI's words
    split: Split | None = None
    details: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[Said] = field(default_factory=list)

    def add(self, said: Said) -> None:
        if said.index:
            return
        self.chunks.append(said)
        self.text += said.text
        self.reasoning += said.reasoning
        self.refusal += said.refusal
        self.details += said.details or []
        self.annotations += said.annotations or []
        self.reason = said.reason or self.reason
        for piece in said.calls or ():
            self._add_piece(piece)

    def _add_piece(self, piece: dict[str, Any]) -> None:
        number, function = int(piece.get("index") or 0), piece.get("function") or {}
        while len(self.calls) <= number:
            self.calls.append({"id": "", "name": "", "arguments": ""})
        call = self.calls[number]
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        call["arguments"] += function.get("arguments") or ""


def read_recording(port: str, data: bytes, *, stream: bool | None = None) -> Recorded:
    """`stream`: whether it is one; None: by its form. Raises BadRequest for what is not a recording, and
    what the port's reader raises."""
    events = events_of(data)
    if stream is None:
        stream = events is not None
    if not stream:
        answer = _json(data)
        if not isinstance(answer, dict):
            raise not_an_answer("it is not a JSON object")
        reader = reader_of(port, answer)
        return _gathered(reader, reader.whole(answer))
    if events is None:
        whole = _json(data)
        events = whole if isinstance(whole, list) else [whole]
    listed = [each for each in map(_unwrapped, events) if isinstance(each, dict)]
    if not listed:
        raise not_an_answer("it has no event")
    reader = reader_of(port, listed[0])
    return _gathered(reader, (said for event in listed for said in reader.read(event)))


def _gathered(reader: Reader, said: Iterable[Said]) -> Recorded:
    found = Recorded()
    for each in said:
        found.add(each)
    found.split = reader.take_usage()
    if found.reason in ("stop", "tool_calls"):
        found.reason = "tool_calls" if found.calls else "stop"
    return found


def reader_of(port: str, first: dict[str, Any]) -> Reader:
    """By the port's name; of providers with two APIs by the form of the answer or its first event."""
    if port not in NAMES:
        raise BadRequest(
            f"{port!r} is not a port.", next_step=f"Use one of {', '.join(NAMES)}.", param="port"
        )
    is_response = first.get("object") == "response" or isinstance(first.get("response"), dict)
    if (is_response and "gemini" not in port) or str(first.get("type")).startswith("response."):
        return ResponseReader()
    if first.get("type") in ("message", "message_start", "error") and port == "bedrock":
        return MessagesReader()  # of Claude's own API there
    return _OWN[port]() if port in _OWN else ShapedReader(DIALECTS[port])


def _unwrapped(event: Any) -> Any:
    """The event within a frame of Bedrock's InvokeModel."""
    held = event.get("chunk") if isinstance(event, dict) else None
    encoded = held.get("bytes") if isinstance(held, dict) else None
    if encoded is None and isinstance(event, dict) and set(event) >= {"bytes"}:
        encoded = event["bytes"]
    return loads(base64.b64decode(encoded)) if isinstance(encoded, str) else event


def events_of(data: bytes) -> list[Any] | None:
    """The events of a stream; None for one JSON object."""
    if (frames := _frames_in(data)) is not None:
        return frames
    text = data.strip()
    if text.startswith((b"data:", b"event:", b":", b"id:", b"retry:")):
        reader = EventReader(_LONGEST)
        found = [data_of(each) for each in (*reader.feed(data), reader.end())]
        return [loads(each) for each in found if each and each != DONE]
    try:
        whole = loads(text)
        return whole if isinstance(whole, list) else None
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip() and line.strip() != DONE]
    try:
        return [loads(line) for line in lines]
    except ValueError:
        raise not_an_answer("it is neither JSON nor server-sent events") from None


def _frames_in(data: bytes) -> list[Any] | None:
    raw = data if _begins_a_frame(data) else _decoded(data)
    if raw is None:
        return None
    from gateway.engines.ports.bedrock.frames import AwsFrames  # of the extra

    return [loads(event) for event in AwsFrames().feed(raw)]


def _decoded(data: bytes) -> bytes | None:
    """The frames of a text in base64, whole or line by line."""
    lines = data.split()
    for parts in ([b"".join(lines)], lines):
        try:
            raw = b"".join([base64.b64decode(part, validate=True) for part in parts])
        except (ValueError, binascii.Error):
            continue
        if _begins_a_frame(raw):
            return raw
    return None


def _begins_a_frame(data: bytes) -> bool:
    if len(data) < _PRELUDE.size:
        return False
    crc: int = _PRELUDE.unpack_from(data)[2]
    return binascii.crc32(data[: _PRELUDE.size - 4]) == crc


def _json(data: bytes) -> Any:
    try:
        return loads(data.strip())
    except ValueError as error:
        raise not_an_answer(f"it is not JSON ({error})") from None


def not_an_answer(why: str) -> BadRequest:
    return BadRequest(
        f"The recording cannot be read: {why}.",
        next_step="Give a whole answer in JSON, or with --stream the events as the provider sent them.",
    )
