"""The OpenAPI document: FastAPI's routes, and the inference routes from their msgspec structs."""

import copy
from typing import Any

import msgspec
from fastapi import FastAPI

from billing.exports.formats import Format
from core.events import UsageKind
from gateway.admin.finance import usage_kinds
from gateway.admin.finance.schemas import COST_GROUPS, USAGE_GROUPS, WIDTHS, query_parameters
from gateway.admin.mcp import McpMessage
from gateway.formats.chat.request import ChatBody
from gateway.formats.completions.request import CompletionBody
from gateway.formats.embeddings import EmbeddingsBody
from gateway.formats.messages.request import CountBody, MessagesBody
from gateway.formats.responses.request import ItemsBody, ResponsesBody
from gateway.formats.scores import RerankBody, ScoreBody
from gateway.serving.api.batches import BatchBody
from gateway.serving.api.completions import MetadataBody
from gateway.serving.api.message_batches import MessageBatchBody
from gateway.serving.api.moderations import ModerationBody
from gateway.serving.api.tokenize import DetokenizeBody, TokenizeBody
from gateway.serving.media.request import ENDPOINTS, FILES, Endpoint

_BODIES: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "Create a chat completion."),
    "/v1/completions": (CompletionBody, "Create a text completion."),
    "/v1/messages": (MessagesBody, "Create a message, in the format of Anthropic's API."),
    "/v1/messages/count_tokens": (
        CountBody,
        "Count the tokens of a conversation, without billing.",
    ),
    "/v1/responses": (ResponsesBody, "Create a response, in the format of OpenAI's Responses API."),
    "/v1/responses/input_tokens": (
        ResponsesBody,
        "Count the tokens of a request, without billing.",
    ),
    "/v1/conversations": (ItemsBody, "Create a conversation, whose items responses build on."),
    "/v1/conversations/{conversation_id}": (ItemsBody, "Change a conversation's metadata."),
    "/v1/conversations/{conversation_id}/items": (ItemsBody, "Append items to a conversation."),
    "/v1/chat/completions/{completion_id}": (
        MetadataBody,
        "Replace the metadata of a stored completion.",
    ),
    "/v1/embeddings": (EmbeddingsBody, "Create embeddings of texts."),
    "/v1/rerank": (RerankBody, "Order documents by their similarity to a query."),
    "/v1/score": (ScoreBody, "Score the similarity of texts."),
    "/v1/moderations": (ModerationBody, "Classify texts by harm category."),
    "/v1/messages/batches": (
        MessageBatchBody,
        "Create a batch of messages, in the format of Anthropic's API.",
    ),
    "/v1/batches": (BatchBody, "Create a batch of asynchronous requests."),
    "/mcp": (McpMessage, "Send one JSON-RPC message of the Model Context Protocol."),
    "/tokenize": (TokenizeBody, "Convert a text or a chat to token ids."),
    "/detokenize": (DetokenizeBody, "Convert token ids to text."),
}
_MEDIA = {
    "audio/transcriptions": "Transcribe an audio file.",
    "audio/translations": "Translate an audio file to English.",
    "audio/speech": "Speak a text.",
    "images/generations": "Make images from a prompt.",
    "images/edits": "Change images as a prompt says.",
    "images/variations": "Make variations of an image.",
}
_QUERIES = {
    "/v1/organization/usage/completions": query_parameters(USAGE_GROUPS, WIDTHS),
    **{
        f"/v1/organization/usage/{each.name}": [
            parameter
            for parameter in query_parameters(usage_kinds.GROUPS, WIDTHS)
            if parameter["name"] != "batch"
        ]
        for each in usage_kinds.ALL
    },
    "/v1/organization/costs": query_parameters(COST_GROUPS, ["1d"]),
}
# What answers are where they are not JSON.
_CONTENT_TYPES = {
    "/metrics": ("text/plain",),
    "/v1/exports": tuple(form.media_type.partition(";")[0] for form in Format),
    "/v1/messages/batches/{batch_id}/results": ("application/x-jsonl",),
    "/v1/files/{file_id}/content": ("application/octet-stream",),
}
# A route's own statuses other than 200.
_STATUSES = {
    "/mcp": {"202": "The message needs no answer.", "405": "There is no stream of the server."},
    "/webhooks/stripe": {
        "400": "The signature is invalid.",
        "413": "The event is too large.",
        "503": "A service that the request needs is unavailable.",
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ERROR_RESPONSES = {
    "400": "The body is invalid; `param` names the field.",
    "401": "The API key is missing or invalid.",
    "402": "The budget or prepaid balance is exhausted.",
    "403": "The API key lacks the permission.",
    "404": "This API key has no such model.",
    "409": "The request conflicts with the current state.",
    "413": "The body is too large.",
    "422": "The body is invalid.",
    "429": "A rate limit is exceeded; `retry-after` gives the wait in seconds.",
    "503": "A service that the request needs is unavailable.",
}


def install_openapi(app: FastAPI) -> None:
    """Replaces `app.openapi`. The document is built once, when it is first requested."""
    default_openapi = app.openapi

    def _document() -> dict[str, Any]:
        if app.openapi_schema is None or "x-tollhouse" not in app.openapi_schema:
            app.openapi_schema = _build_document(copy.deepcopy(default_openapi()))
        return app.openapi_schema

    app.openapi = _document  # type: ignore[method-assign]


def _build_document(document: dict[str, Any]) -> dict[str, Any]:
    types = [body for body, _ in _BODIES.values()]
    refs, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(components)
    schemas["Error"] = _ERROR
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for (path, (_, summary)), ref in zip(_BODIES.items(), refs, strict=True):
        methods = document["paths"].setdefault(path, {})
        methods["post"] = methods.get("post", {}) | _operation(path, summary, ref)
    for endpoint in ENDPOINTS:
        document["paths"][endpoint.route] = {"post": _media_operation(endpoint)}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path.startswith(("/v1/", "/admin/", "/tokenize", "/detokenize", "/mcp")):
                operation["security"] = [{"key": []}]
                _add_error_responses(operation)
    for path, parameters in _QUERIES.items():
        operation = document["paths"][path]["get"]
        operation["parameters"] = [*operation.get("parameters", ()), *parameters]
    for path, kinds in _CONTENT_TYPES.items():
        for operation in document["paths"].get(path, {}).values():
            if "200" in operation["responses"]:
                text: dict[str, Any] = {"schema": {"type": "string"}}
                operation["responses"]["200"]["content"] = dict.fromkeys(kinds, text)
    for path, statuses in _STATUSES.items():
        for operation in document["paths"].get(path, {}).values():
            for status, told in statuses.items():
                operation["responses"][status] = {"description": told}
    document["x-tollhouse"] = {"errors": "#/components/schemas/Error"}
    return document


def _operation(path: str, summary: str, ref: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "tags": ["inference"],
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref}}},
        "responses": {"200": {"description": "Success.", "content": content}},
    }


def _media_operation(endpoint: Endpoint) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    names = ("model", *endpoint.required)
    schema = {
        "type": "object",
        "required": list(names),
        "properties": {
            name: {**text, "format": "binary"} if name in FILES else text for name in names
        },
        "additionalProperties": True,
    }
    kind = "multipart/form-data" if endpoint.form else "application/json"
    described = _operation(endpoint.route, _MEDIA[endpoint.name], {})
    described["requestBody"]["content"] = {kind: {"schema": schema}}
    answer = "application/octet-stream" if endpoint.kind is UsageKind.SPEECH else "application/json"
    described["responses"]["200"]["content"] = {answer: {"schema": {}}}
    return described


def _add_error_responses(operation: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/Error"}
    name = operation.get("operationId", "")
    if "messages" in name or name == "mcp":
        schema = {"type": "object"}  # Anthropic's error format, and JSON-RPC's
    for status, description in _ERROR_RESPONSES.items():
        operation["responses"][status] = {
            "description": description,
            "content": {"application/json": {"schema": schema}},
        }
