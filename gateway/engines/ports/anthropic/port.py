"""The port to Anthropic's API."""

from collections.abc import Mapping

from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.anthropic.answer import MessagesReader
from gateway.engines.ports.anthropic.request import Style, messages_body
from gateway.engines.ports.port import Call, Notes, SsePort, chat_only
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest

VERSION = "2023-06-01"


class AnthropicPort(SsePort):
    name = "anthropic"
    capabilities = frozenset(("tools", "json", "images", "documents", "reasoning"))
    parameters = frozenset(("top_k", "continue_final_message", "reasoning_effort"))

    def __init__(self, upstream: Upstream) -> None:
        options = upstream.options
        self._options = options
        self._headers = {
            "x-api-key": upstream.api_key,
            "anthropic-version": str(options.get("version") or VERSION),
        }
        if beta := options.get("beta"):
            self._headers["anthropic-beta"] = str(beta)

    def call(self, job: Job, model: str) -> Call:
        chat_only(job.request, self.name)
        notes = Notes()
        body = {"model": model, **messages_body(job, Style(self._options, model), notes)}
        if job.request.stream:
            body["stream"] = True
        return Call("/v1/messages", body, notes=notes.listed())

    def reader(self, request: InferenceRequest) -> MessagesReader:
        return MessagesReader()

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return self._headers
