"""The port to providers of OpenAI's form, by their dialect."""

import hashlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gateway.catalog.upstreams import Upstream
from gateway.engines.openai_body import path_of, upstream_body
from gateway.engines.ports.conversation import cites
from gateway.engines.ports.port import Call, Notes, SsePort, refuse_set, refused
from gateway.engines.ports.shaped.answer import ShapedReader
from gateway.engines.ports.shaped.azure_tokens import AzureTokens
from gateway.engines.ports.shaped.dialects import DIALECTS
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest

_MISTRAL_ID = 9  # characters of a tool call's id, letters and digits
# What a message or part carries for other ports.
_MARKS = ("of_call", "is_error", "reasoning_details", "document")


class ShapedPort(SsePort):
    def __init__(self, upstream: Upstream) -> None:
        self.dialect = dialect = DIALECTS[upstream.provider]
        self.name = dialect.name
        self.capabilities = dialect.capabilities
        self.parameters = dialect.parameters
        self._options = upstream.options
        self._tokens: AzureTokens | None = None
        key = upstream.api_key
        bearer = dialect.header == "authorization"
        self._headers = {dialect.header: f"Bearer {key}" if bearer else key}
        if self.name == "azure" and not key:
            self._tokens = AzureTokens(upstream.options)

    def call(self, job: Job, model: str) -> Call:
        request, notes = job.request, Notes()
        refuse_set(request, self.name, *self.dialect.refused)
        body = upstream_body(
            job, model, shared_cache=True, reasoning_back=bool(request.tool_reasoning)
        )
        for name, to in self.dialect.renamed.items():
            if name in body and not (name == "max_tokens" and request.messages is None):
                body[to] = body.pop(name)
        if not self.dialect.stream_usage:
            body.pop("stream_options", None)
        if request.messages is not None:
            body["messages"] = [self._message(each, request) for each in request.messages]
            if request.tool_reasoning:
                body["messages"] = with_reasoning(body["messages"], request.tool_reasoning)
            if self.name == "mistral":
                _as_mistral(body, request)
        return Call(self._path(request, model), body, notes=notes.listed())

    def _path(self, request: InferenceRequest, model: str) -> str:
        route = path_of(request).removeprefix("/v1")
        version = self._options.get("api_version")
        if self.name != "azure":
            return f"{self.dialect.path}{route}"
        if not version:
            return f"/openai/v1{route}"
        named = f"/openai/deployments/{quote(model, safe='')}{route}"
        return f"{named}?api-version={quote(str(version), safe='')}"

    def _message(self, message: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
        marks: tuple[str, ...] = ("cache_control", "volatile", "rank", *_MARKS)
        if self.dialect.details_back:  # OpenRouter passes both on
            marks = ("volatile", "rank", "of_call", "is_error", "document")
        plain = {name: value for name, value in message.items() if name not in marks}
        content = plain.get("content")
        if isinstance(content, list):
            if any(cites(part) for part in content):
                raise refused(request, "citations", self.name)
            parts = [
                {name: value for name, value in part.items() if name not in marks}
                for part in content
            ]
            plain["content"] = [self._part(part, request) for part in parts] or None
        return plain

    def _part(self, part: dict[str, Any], request: InferenceRequest) -> dict[str, Any]:
        if part["type"] != "file":
            return part
        file = part["file"]
        if file.get("context") is not None:
            raise refused(request, "context", self.name)
        part = {**part, "file": {k: v for k, v in file.items() if k != "citations"}}
        if self.name == "mistral":
            url = file.get("file_data") or file.get("url")
            if not url:
                raise refused(request, "documents", self.name, "a file is sent as data, not by id")
            return {"type": "document_url", "document_url": url}
        if file.get("url") is not None:
            raise refused(request, "documents", self.name, "it fetches no addresses; send data")
        return part

    def reader(self, request: InferenceRequest) -> ShapedReader:
        return ShapedReader(self.dialect)

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        return self._headers if self._tokens is None else await self._tokens.headers()


def with_reasoning(
    messages: list[dict[str, Any]], reasoning: Mapping[str, str]
) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        thought = reasoning.get(calls[0]["id"]) if calls else None
        found.append(message if thought is None else {**message, "reasoning_content": thought})
    return found


def _as_mistral(body: dict[str, Any], request: InferenceRequest) -> None:
    """Mistral's words for a forced call and a begun answer, and its ids of calls."""
    if body.get("tool_choice") == "required":
        body["tool_choice"] = "any"
    body.pop("add_generation_prompt", None)
    body.pop("continue_final_message", None)
    for message in body["messages"]:
        if (call_id := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = mistral_id(call_id)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**each, "id": mistral_id(each["id"])} for each in calls]
    if request.continue_final_message:
        body["messages"][-1]["prefix"] = True


def mistral_id(call_id: str) -> str:
    """The id itself where Mistral made it; else one that is the same for the same id."""
    if len(call_id) == _MISTRAL_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID]
