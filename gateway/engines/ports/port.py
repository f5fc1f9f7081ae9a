"""The interface of a port: how one provider's API carries a request and its answer.

A port knows shapes alone, no connections: it makes the body of a call, and reads the events of an
answer as pieces of a chat's answer. What a provider cannot express is refused by the parameter's name
(`refused`), and what is only approximated is said in the call's notes, which reach the client.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct, field

from core.errors import NotFound, UnsupportedParameter
from gateway.engines.answer_fields import Said
from gateway.engines.ports.split import Split
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest

APPROXIMATED_HEADER = "x-tollhouse-approximated"  # the notes of a call
# Sampling parameters of OpenAI's own API, with the values that have no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None,),
    "top_p": (None,),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "seed": (None,),
    "logprobs": (None,),
    "logit_bias": ({},),
    "n": (1,),
    "stop": ((),),
}


class Call(Struct, frozen=True):
    """One POST to the provider."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()  # what of the request is only approximated


class Reader(Protocol):
    """Reads one answer, whole or by its events. It raises what `server_error` makes of an error that
    the provider reports, and ValueError, KeyError, TypeError or AttributeError for what it cannot
    read."""

    ended: bool  # the provider said that the answer is complete

    def text(self, data: bytes) -> str:
        """The text of an event that is one piece of text and nothing else; else empty."""

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        """What an event says. An event of an unknown type says nothing."""

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        """What an answer says that is not streamed."""

    def take_usage(self) -> Split | None:
        """As reported since the last call, of the answer so far; None without a new report."""


class Frames(Protocol):
    """Reads a stream that is not of server-sent events."""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole by now, each a JSON object. Raises ValueError for damaged ones."""


class Port(Protocol):
    name: str
    capabilities: frozenset[str]
    parameters: frozenset[str]  # beyond OpenAI's own

    def call(self, job: Job, model: str) -> Call:
        """Raises UnsupportedParameter for what the provider cannot express."""

    def reader(self, request: InferenceRequest) -> Reader: ...

    def frames(self) -> Frames:
        """For streams of binary frames."""

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        """The headers that authenticate this call."""


class SsePort:
    """What ports share whose streams are server-sent events."""

    def frames(self) -> Frames:
        raise ValueError("the provider sent a stream of binary frames")


class Notes:
    """What of one request is only approximated, each said once."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add(self, text: str) -> None:
        self._said[text] = None

    def listed(self) -> tuple[str, ...]:
        return tuple(self._said)


class ProviderError(Struct):
    """An error that a provider reports inside of an answer."""

    status: int
    detail: Any = field(default_factory=dict)


class ReportedError(ValueError):
    """Raised by a reader; the parser makes the client's error of it."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(f"the provider reports an error ({status})")
        self.reported = ProviderError(status, detail)


def shown_name(request: InferenceRequest, name: str) -> str:
    """A parameter's name on the client's API."""
    return str(request.extra.get("named", {}).get(name, name))


def refused(request: InferenceRequest, name: str, provider: str, why: str = "") -> Exception:
    shown = shown_name(request, name)
    return UnsupportedParameter(
        f"{shown} is not supported by this model's provider ({provider})"
        + (f": {why}." if why else "."),
        next_step=f"Remove {shown}, or use a model of another provider.",
        param=shown,
    )


def refuse_set(request: InferenceRequest, provider: str, *names: str) -> None:
    """Raise for the first of these parameters that is set to a value with an effect."""
    for name in names:
        if getattr(request, name) not in NEUTRAL[name]:
            raise refused(request, name, provider)


def chat_only(request: InferenceRequest, provider: str) -> None:
    """Raise for a route that a provider of chats does not have."""
    if request.inputs is not None:
        kind = "embeddings"
    elif request.messages is None:
        kind = "completions"
    else:
        return
    raise NotFound(
        f"This model's provider ({provider}) has no {kind}.",
        next_step="Use /v1/chat/completions, /v1/responses or /v1/messages, or another model.",
        code=f"{kind}_not_supported",
        param="model",
    )
