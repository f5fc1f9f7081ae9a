"""The port to Cohere."""

from collections.abc import Mapping

from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.cohere.answer import CohereReader
from gateway.engines.ports.cohere.request import chat_body
from gateway.engines.ports.port import Call, Notes, SsePort, chat_only
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest


class CoherePort(SsePort):
    name = "cohere"
    capabilities = frozenset(("tools", "json", "images", "reasoning"))
    parameters = frozenset(("top_k", "reasoning_effort"))

    def __init__(self, upstream: Upstream) -> None:
        self._headers = {"authorization": f"Bearer {upstream.api_key}"}

    def call(self, job: Job, model: str) -> Call:
        chat_only(job.request, self.name)
        notes = Notes()
        return Call("/v2/chat", chat_body(job, model, notes), notes=notes.listed())

    def reader(self, request: InferenceRequest) -> CohereReader:
        return CohereReader()

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return self._headers
