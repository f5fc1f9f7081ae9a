"""The interface of an API surface (chat, completions, messages, responses): parsing and responses."""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from core.errors import TollhouseError
from gateway.answers.choices import ChoiceOutput, Delta
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.request.inference import InferenceRequest, Usage


class ResponseInfo(Struct, frozen=True):
    """Metadata of a response."""

    request_id: str
    created: int  # Unix seconds
    model: str  # the name that the client sent
    codec: TextCodec | None
    prompt_tokens: int
    prompts: Sequence[list[int]] = ()  # token ids of each prompt, where the client asks for them


class StreamWriter(Protocol):
    """Encodes server-sent events."""

    def begin(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes: ...

    def failed(self, error: TollhouseError) -> bytes: ...


class Surface(Protocol):
    route: str
    style: str  # openai | anthropic: names of the rate limit headers

    def parse(self, raw: bytes) -> InferenceRequest: ...

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> StreamWriter: ...

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]: ...

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]: ...
