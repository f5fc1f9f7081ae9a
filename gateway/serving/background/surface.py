"""The Responses surface of one request whose response is stored, or that builds on stored ones."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo
from gateway.formats.responses.response import ResponsesSurface, ResponseStream
from gateway.request.inference import InferenceRequest, Usage


class StoredSurface(ResponsesSurface):
    def __init__(self, fields: dict[str, Any]) -> None:
        """`fields` of the response that the body no longer says, such as previous_response_id."""
        self._fields = fields
        self.finished: dict[str, Any] | None = None  # the response, once it is complete or failed

    def parse(self, raw: bytes) -> InferenceRequest:
        request = super().parse(raw)
        return replace(request, extra=request.extra | {"fields": self._fields})

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        self.finished = super().answer(info, request, choices, usage)
        return self.finished

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> ResponseStream:
        return ResponseStream(info, request, self._finish)

    def _finish(self, response: dict[str, Any]) -> None:
        self.finished = response
