"""The endpoints that are passed to an upstream which declares them, and what each counts."""

from dataclasses import dataclass

from core.events import UsageKind


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
