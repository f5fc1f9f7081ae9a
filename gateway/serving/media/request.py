"""Reads the body of an audio or image request, and writes the one that goes to the upstream."""

import asyncio
import hashlib
import io
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
from gateway.serving.media.audio_length import estimate_of, seconds_of


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
