"""The API's own document: FastAPI's, and the inference routes from the structs that read them."""

import copy
from typing import Any

import msgspec
from fastapi import FastAPI

from gateway.api.batches import BatchBody
from gateway.api.moderations import ModerationBody
from gateway.api.tokenize import DetokenizeBody, TokenizeBody
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.embeddings import EmbeddingsBody
from gateway.schemas.messages import CountBody, MessagesBody
from gateway.schemas.responses import ResponsesBody

_BODIES: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a chat, whole or as a stream."),
    "/v1/completions": (CompletionBody, "Continue a text."),
    "/v1/messages": (MessagesBody, "Answer a conversation in Anthropic's shapes."),
    "/v1/messages/count_tokens": (CountBody, "Count a conversation's tokens; nothing is billed."),
    "/v1/responses": (ResponsesBody, "Answer in the shapes of OpenAI's Responses API."),
    "/v1/responses/input_tokens": (ResponsesBody, "Count a request's tokens; nothing is billed."),
    "/v1/embeddings": (EmbeddingsBody, "Embed texts, where an upstream can."),
    "/v1/moderations": (ModerationBody, "Score texts for harm."),
    "/v1/batches": (BatchBody, "Order requests that nobody waits for."),
    "/tokenize": (TokenizeBody, "A text or chat as token ids."),
    "/detokenize": (DetokenizeBody, "Token ids as a text."),
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
_REFUSALS = {
    "400": "The body is wrong; `param` names the field.",
    "401": "The key is missing or wrong.",
    "402": "The money has ended.",
    "403": "The key may not do this.",
    "404": "There is no such model for this key.",
    "409": "It clashes with what is there.",
    "413": "The body is too large.",
    "422": "The body is wrong.",
    "429": "A limit is reached; `retry-after` says when to come again.",
    "503": "Something that the request needs is not ready.",
}


def install(app: FastAPI) -> None:
    """Replaces `app.openapi`; made once, at the first request for it."""
    plain = app.openapi

    def _document() -> dict[str, Any]:
        if app.openapi_schema is None or "x-tollhouse" not in app.openapi_schema:
            app.openapi_schema = _written(copy.deepcopy(plain()))
        return app.openapi_schema

    app.openapi = _document  # type: ignore[method-assign]


def _written(document: dict[str, Any]) -> dict[str, Any]:
    types = [body for body, _ in _BODIES.values()]
    refs, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(components)
    schemas["Error"] = _ERROR
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for (path, (_, summary)), ref in zip(_BODIES.items(), refs, strict=True):
        document["paths"].setdefault(path, {})["post"] = _operation(path, summary, ref)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path.startswith(("/v1/", "/admin/", "/tokenize", "/detokenize")):
                operation["security"] = [{"key": []}]
                _add_refusals(operation)
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
        "responses": {"200": {"description": "Done.", "content": content}},
    }


def _add_refusals(operation: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/Error"}
    if "messages" in operation.get("operationId", ""):
        schema = {"type": "object"}  # Anthropic's shape
    for status, words in _REFUSALS.items():
        operation["responses"][status] = {
            "description": words,
            "content": {"application/json": {"schema": schema}},
        }
