"""Reads the body of an audio or image request, and writes the one that goes to the upstream."""

import asyncio
import hashlib
import io
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import orjson
from starlette.datastructures import UploadFile
from starlette.requests import Request

from billing.pricing.pricing import Component, Counts
from core.errors import BadRequest
from core.events import UsageKind
from gateway.edge.decoding import check_label, decode, parse_body
from gateway.edge.uploads import bounded_form
from gateway.request.inference import InferenceRequest

# The length of an audio file from its container, without decoding it.
#
# WAV (RIFF), FLAC (RFC 9639), Ogg with Opus or Vorbis (RFC 3533, RFC 7845), MPEG audio layer III frames
# (ISO/IEC 11172-3) and MP4 (ISO/IEC 14496-12).


_BYTES_A_SECOND = 2_000  # of a file of another form: 16 kbit/s, so that the estimate is rather long
_MOST_S = 24 * 3600
_MP3_KBIT = {  # by version: 3 is MPEG-1, the others MPEG-2 and 2.5
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATE = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


def seconds_of(data: bytes) -> int | None:
    """Whole seconds, a started one counted; None if the form is not known or says nothing."""
    for signature, at, measure in _FORMS:
        if data[at : at + len(signature)] == signature:
            try:
                return _whole(measure(data))
            except (struct.error, IndexError, ZeroDivisionError):
                return None
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return _whole(_mp3(data))
    return None


def estimate_of(data: bytes) -> int:
    """Seconds of a file whose form is not known."""
    return max(1, min(_MOST_S, -(-len(data) // _BYTES_A_SECOND)))


def _whole(measured: tuple[int, int] | None) -> int | None:
    """Of samples and their rate."""
    if measured is None or measured[0] <= 0 or measured[1] <= 0:
        return None
    return min(_MOST_S, -(-measured[0] // measured[1]))


def _wav(data: bytes) -> tuple[int, int] | None:
    at, block, rate = 12, 0, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if name == b"fmt ":
            rate, _, block = struct.unpack_from("<IIH", data, at + 12)
        if name == b"data":
            # A writer that streams does not know the size, and states 0 or the largest number.
            there = len(data) - at - 8
            return ((min(size, there) or there) // block, rate) if block else None
        at += 8 + size + (size & 1)
    return None


def _flac(data: bytes) -> tuple[int, int]:
    packed = int.from_bytes(data[18:26], "big")
    return packed & ((1 << 36) - 1), packed >> 44


def _ogg(data: bytes) -> tuple[int, int] | None:
    last = data.rfind(b"OggS")
    granule = struct.unpack_from("<q", data, last + 6)[0]
    opus = data.find(b"OpusHead", 0, 512)
    if opus >= 0:
        skipped = struct.unpack_from("<H", data, opus + 10)[0]
        return granule - skipped, 48_000
    vorbis = data.find(b"\x01vorbis", 0, 512)
    return (granule, struct.unpack_from("<I", data, vorbis + 12)[0]) if vorbis >= 0 else None


def _mp4(data: bytes) -> tuple[int, int] | None:
    at = data.find(b"mvhd")
    if at < 0:
        return None
    if data[at + 4] == 1:
        rate, length = struct.unpack_from(">IQ", data, at + 24)
    else:
        rate, length = struct.unpack_from(">II", data, at + 16)
    return length, rate


def _mp3(data: bytes) -> tuple[int, int] | None:
    at, samples, rate = 0, 0, 0
    if data[:3] == b"ID3" and len(data) >= 10:
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        at = 10 + size
    while at + 4 <= len(data):
        frame = _mp3_frame(data, at)
        if frame is None:
            if samples:
                break
            at += 1
            continue
        length, count, rate = frame
        samples += count
        at += length
    return (samples, rate) if samples else None


def _mp3_frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """(bytes, samples, samples a second) of the frame that begins here."""
    if data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:  # layer III
        return None
    version, third = data[at + 1] >> 3 & 3, data[at + 2]
    bitrate, speed, padding = third >> 4, third >> 2 & 3, third >> 1 & 1
    if version == 1 or bitrate in (0, 15) or speed == 3:
        return None
    kbit = _MP3_KBIT[3 if version == 3 else 2][bitrate]
    rate, samples = _MP3_RATE[version][speed], 1152 if version == 3 else 576
    return samples // 8 * kbit * 1000 // rate + padding, samples, rate


_FORMS: tuple[tuple[bytes, int, Callable[[bytes], tuple[int, int] | None]], ...] = (
    (b"WAVE", 8, _wav),
    (b"fLaC", 0, _flac),
    (b"OggS", 0, _ogg),
    (b"ftyp", 4, _mp4),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str  # as an upstream's entry declares it
    kind: UsageKind
    form: bool  # multipart/form-data; else JSON
    texts: tuple[str, ...]  # fields that are screened as prompts
    required: tuple[str, ...]  # fields without which it is refused
    streams: bool = False  # takes `stream`

    @property
    def route(self) -> str:
        return f"/v1/{self.name}"


FILES = ("file", "image")  # fields that are files
ENDPOINTS = (
    Endpoint("audio/transcriptions", UsageKind.AUDIO, True, ("prompt",), ("file",), True),
    Endpoint("audio/translations", UsageKind.AUDIO, True, ("prompt",), ("file",)),
    Endpoint("audio/speech", UsageKind.SPEECH, False, ("input", "instructions"), ("input",)),
    Endpoint("images/generations", UsageKind.IMAGE, False, ("prompt",), ("prompt",), True),
    Endpoint("images/edits", UsageKind.IMAGE, True, ("prompt",), ("image", "prompt"), True),
    Endpoint("images/variations", UsageKind.IMAGE, True, (), ("image",)),
)


_MAX_FILES, _MAX_FIELDS = 17, 40  # 16 images and a mask
_MOST_IMAGES = 10  # as in OpenAI's API
# The most tokens that a request may turn out to have, to hold money for where tokens have a price:
# of a second of audio (OpenAI's models: 10 in, and fewer than 10 of text), of a spoken character
# (20 tokens a second, 12 characters), of an image in the highest quality (6,240).
_TOKENS_A_SECOND = 10
_TOKENS_A_CHARACTER = 2
_TOKENS_AN_IMAGE = 6_240

_json = msgspec.json.Decoder(dict[str, Any])
Field = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class FormFile:
    name: str
    content_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """`units` are expected: images asked for, characters, or seconds as the file states them."""

    endpoint: Endpoint
    model: str
    fields: tuple[Field, ...]  # in the client's order; a file is a FormFile
    units: int
    stream: bool
    measured: bool  # whether `units` are exact, rather than an estimate
    end_user: str | None

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(value for name, value in self.fields if self._is_text(name, value))

    def with_texts(self, texts: tuple[str, ...]) -> "MediaRequest":
        left = iter(texts)
        fields = tuple(
            (name, next(left) if self._is_text(name, value) else value)
            for name, value in self.fields
        )
        changed = replace(self, fields=fields)
        if self.endpoint.kind is UsageKind.SPEECH:
            return replace(changed, units=len(dict(fields)["input"]))
        return changed

    def _is_text(self, name: str, value: Any) -> bool:
        return name in self.endpoint.texts and isinstance(value, str) and bool(value)

    def fingerprint(self) -> bytes:
        """SHA-256 over the fields: the same for a request that is sent again."""
        found = hashlib.sha256()
        for name, value in self.fields:
            if isinstance(value, FormFile):
                parts = [
                    name.encode(),
                    value.name.encode(),
                    value.content_type.encode(),
                    value.data,
                ]
            else:
                parts = [name.encode(), orjson.dumps(value)]
            for part in parts:
                found.update(len(part).to_bytes(8, "big") + part)
        return found.digest()

    def as_prompt(self) -> InferenceRequest:
        """The texts, for moderation and routing."""
        return InferenceRequest(
            route=self.endpoint.route,
            model=self.model,
            prompts=self.texts,
            stream=self.stream,
            end_user=self.end_user,
        )

    def bound(self) -> Counts:
        """The most that it may cost, by component: money is held for it."""
        units, text = self.units, sum(len(each.encode()) for each in self.texts)
        if self.endpoint.kind is UsageKind.AUDIO:
            tokens = units * _TOKENS_A_SECOND
            counts = (Component.AUDIO_SECOND, units), (text + tokens, tokens)
        elif self.endpoint.kind is UsageKind.SPEECH:
            counts = (Component.CHARACTER, units), (text, units * _TOKENS_A_CHARACTER)
        else:
            pictures = sum(isinstance(value, FormFile) for _, value in self.fields)
            tokens = units * _TOKENS_AN_IMAGE
            counts = (Component.IMAGE, units), (text + pictures * _TOKENS_AN_IMAGE, tokens)
        unit, (given, made) = counts
        return Counts((unit, (Component.INPUT, given), (Component.OUTPUT, made)))

    def body(self, upstream_model: str) -> tuple[Any, str]:
        """The body for the upstream, made again for each attempt, and its content type."""
        if not self.endpoint.form:
            return orjson.dumps(dict(self.fields) | {"model": upstream_model}), "application/json"
        form = aiohttp.FormData()
        for name, value in self.fields:
            if isinstance(value, FormFile):
                form.add_field(
                    name,
                    io.BytesIO(value.data),
                    filename=value.name,
                    content_type=value.content_type,
                )
            else:
                form.add_field(name, upstream_model if name == "model" else value)
        writer = form()
        return writer, writer.headers["content-type"]


async def read_json(endpoint: Endpoint, raw: bytes) -> MediaRequest:
    body = await parse_body(lambda given: decode(_json, given), raw)
    fields = tuple((name, value) for name, value in body.items() if value is not None)
    return await asyncio.to_thread(_checked, endpoint, fields)


async def read_form(endpoint: Endpoint, request: Request, max_bytes: int) -> MediaRequest:
    async with bounded_form(request, max_bytes, _MAX_FILES, _MAX_FIELDS) as form:
        fields: list[Field] = []
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                kind = value.content_type or "application/octet-stream"
                fields.append((name, FormFile(value.filename or name, kind, await value.read())))
            else:
                fields.append((name, value))
    return await asyncio.to_thread(_checked, endpoint, tuple(fields))


def _checked(endpoint: Endpoint, fields: tuple[Field, ...]) -> MediaRequest:
    given = {name.removesuffix("[]"): value for name, value in fields}
    for name in ("model", *endpoint.required):
        value = given.get(name)
        if value is None or value == "":
            raise _wrong(name, f"{name} is missing.", "missing_required_parameter")
        if isinstance(value, FormFile) != (name in FILES):
            kind = "a file" if name in FILES else "text"
            raise _wrong(name, f"{name} must be {kind}.")
    for name in ("model", *endpoint.texts):
        if not isinstance(given.get(name, ""), str):
            raise _wrong(name, f"{name} must be text.")
    stream = _truth("stream", given.get("stream"))
    if stream and not endpoint.streams:
        raise _wrong("stream", f"{endpoint.route} does not take stream.", "unsupported_parameter")
    units, measured = _units(endpoint, given)
    user = given.get("user")
    if user is not None and not isinstance(user, str):
        raise _wrong("user", "user must be text.")
    return MediaRequest(
        endpoint, given["model"], fields, units, stream, measured, check_label("user", user)
    )


def _units(endpoint: Endpoint, given: dict[str, Any]) -> tuple[int, bool]:
    if endpoint.kind is UsageKind.SPEECH:
        return len(given["input"]), True
    if endpoint.kind is UsageKind.IMAGE:
        return _count(given.get("n")), True
    data = given["file"].data
    if not data:
        raise _wrong("file", "The file is empty.")
    seconds = seconds_of(data)
    return (estimate_of(data), False) if seconds is None else (seconds, True)


def _count(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 4:
        value = int(value)
    if value is None:
        return 1
    if type(value) is not int or not 1 <= value <= _MOST_IMAGES:
        raise _wrong("n", f"n is {str(value)[:40]!r}; it must be 1 to {_MOST_IMAGES}.")
    return value


def _truth(name: str, value: Any) -> bool:
    if value in (True, "true", "True", "1"):
        return True
    if value in (None, False, "false", "False", "0", ""):
        return False
    raise _wrong(name, f"{name} is {str(value)[:40]!r}; it must be true or false.")


def _wrong(param: str, problem: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(
        problem, next_step=f"Correct {param}; see docs/customer.md.", param=param, code=code
    )
