"""Errors in the forms of OpenAI's and Anthropic's APIs."""

from http import HTTPStatus
from typing import Any

from core.errors import (
    ContextLengthExceeded,
    InsufficientQuota,
    TollhouseError,
    UnsupportedParameter,
)


def error_object(error: TollhouseError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


_ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def is_of_messages(path: str) -> bool:
    """Whether the path belongs to Anthropic's API alone."""
    return path == ROUTE or path.startswith(f"{ROUTE}/")


def anthropic_error(error: TollhouseError, request_id: str) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(HTTPStatus(error.status), "api_error")
    if isinstance(error, InsufficientQuota):
        kind = "billing_error"
    content: dict[str, Any] = {"type": kind, "message": _message_of(error)}
    if isinstance(error, UnsupportedParameter) and error.details is not None:
        content["details"] = error.details
    return {"type": "error", "error": content, "request_id": request_id}


def _message_of(error: TollhouseError) -> str:
    """Agents make their conversation shorter when an error has the words of Anthropic's API."""
    if not isinstance(error, ContextLengthExceeded):
        return str(error)
    prompt, output, limit = error.prompt_tokens, error.max_tokens, error.limit
    if prompt is None or limit is None:
        return f"prompt is too long: {error}"
    if prompt >= limit or output is None:
        most = limit if prompt > limit else limit - 1  # a token of the answer needs a place too
        return f"prompt is too long: {prompt} tokens > {most} maximum. {error.next_step}"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
        f"decrease input length or `max_tokens` and try again. {error.next_step}"
    )


ROUTE = "/v1/messages"
