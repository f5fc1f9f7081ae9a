"""The ports to Gemini on its own address, and to Google's and Anthropic's models on Vertex AI."""

from collections.abc import Mapping

from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.anthropic.answer import MessagesReader
from gateway.engines.ports.anthropic.request import Style, messages_body
from gateway.engines.ports.gemini.answer import GeminiReader
from gateway.engines.ports.gemini.request import content_body
from gateway.engines.ports.gemini.tokens import GoogleTokens
from gateway.engines.ports.port import Call, Notes, SsePort, chat_only
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest

ANTHROPIC_VERSION = "vertex-2023-10-16"


class GeminiPort(SsePort):
    name = "gemini"
    capabilities = frozenset(("tools", "json", "images", "audio", "documents", "reasoning"))
    parameters = frozenset(("top_k", "reasoning_effort"))

    def __init__(self, upstream: Upstream) -> None:
        self._options = upstream.options
        self._key = upstream.api_key

    def call(self, job: Job, model: str) -> Call:
        chat_only(job.request, self.name)
        notes = Notes()
        body = content_body(job, model, notes)
        way = "streamGenerateContent?alt=sse" if job.request.stream else "generateContent"
        return Call(f"{self._models()}/{model}:{way}", body, notes=notes.listed())

    def _models(self) -> str:
        return f"/{self._options.get('version') or 'v1beta'}/models"

    def reader(self, request: InferenceRequest) -> GeminiReader:
        return GeminiReader()

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return {"x-goog-api-key": self._key}


class VertexPort(GeminiPort):
    name = "vertex"

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream)
        self._tokens = GoogleTokens(
            upstream.api_key, str(upstream.options.get("credentials") or "")
        )

    def _models(self) -> str:
        return models_of(self._options, "google")

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return await self._tokens.headers()


class VertexAnthropicPort(SsePort):
    """Anthropic's models, whose body says the version and not the model."""

    name = "vertex-anthropic"
    capabilities = frozenset(("tools", "json", "images", "documents", "reasoning"))
    parameters = frozenset(("top_k", "continue_final_message", "reasoning_effort"))

    def __init__(self, upstream: Upstream) -> None:
        self._options = upstream.options
        self._tokens = GoogleTokens(
            upstream.api_key, str(upstream.options.get("credentials") or "")
        )

    def call(self, job: Job, model: str) -> Call:
        chat_only(job.request, self.name)
        notes = Notes()
        body = messages_body(job, Style(self._options, model, self.name), notes)
        body["anthropic_version"] = ANTHROPIC_VERSION
        if job.request.stream:
            body["stream"] = True
        way = "streamRawPredict" if job.request.stream else "rawPredict"
        return Call(
            f"{models_of(self._options, 'anthropic')}/{model}:{way}", body, notes=notes.listed()
        )

    def reader(self, request: InferenceRequest) -> MessagesReader:
        return MessagesReader()

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return await self._tokens.headers()


def models_of(options: Mapping[str, object], publisher: str) -> str:
    place = f"/v1/projects/{options['project']}/locations/{options['location']}"
    return f"{place}/publishers/{publisher}/models"
