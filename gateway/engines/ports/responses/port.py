"""The port to OpenAI's Responses."""

from collections.abc import Mapping

from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.port import Call, Notes, SsePort, chat_only
from gateway.engines.ports.responses.answer import ResponseReader
from gateway.engines.ports.responses.request import responses_body
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest


class ResponsesPort(SsePort):
    name = "openai-responses"
    capabilities = frozenset(("tools", "json", "images", "documents", "reasoning"))
    parameters = frozenset(("reasoning_effort", "service_tier"))

    def __init__(self, upstream: Upstream) -> None:
        self._path = str(upstream.options.get("path") or "/v1/responses")
        self._headers = {"authorization": f"Bearer {upstream.api_key}"}
        if upstream.options.get("path"):  # Azure's, whose key has a header of its own
            self._headers = {"api-key": upstream.api_key}

    def call(self, job: Job, model: str) -> Call:
        chat_only(job.request, self.name)
        notes = Notes()
        body = responses_body(job, model, notes)
        if job.request.stream:
            body["stream"] = True
        return Call(self._path, body, notes=notes.listed())

    def reader(self, request: InferenceRequest) -> ResponseReader:
        return ResponseReader()

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return self._headers
