"""Exception handlers of the FastAPI routes: the API's error object, a request id, no traceback."""

import difflib
import errno
import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from core.database import unstorable
from core.errors import BadRequest, DependencyDown, NotFound, TollhouseError
from core.ids import REQUEST, new_id
from gateway.edge.api_errors import anthropic_error, error_object, is_of_messages
from gateway.serving.headers import error_headers

log = logging.getLogger("tollhouse.api")
# Parts of OpenAI's, Anthropic's and vLLM's APIs whose absence clients should not take for a typo.
_UNSUPPORTED = (
    *("/v1/audio", "/v1/images", "/v1/videos"),
    *("/v1/realtime", "/v1/fine_tuning", "/v1/assistants", "/v1/threads", "/v1/vector_stores"),
    *(
        "/v1/responses/compact",
        "/v1/uploads",
        "/v1/evals",
        "/v1/containers",
        "/v1/skills",
        "/v1/complete",
    ),
)
ANTHROPIC_VERSION = "anthropic-version"  # the header that Anthropic's clients send


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TollhouseError, _tollhouse_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(DataError, _data_error)
    app.add_exception_handler(OperationalError, _operational_error)
    app.add_exception_handler(OSError, _os_error)
    app.add_exception_handler(Exception, _unhandled)


def error_response(request: Request, error: TollhouseError) -> JSONResponse:
    """In Anthropic's form on its routes, and where its SDK asks; else in OpenAI's."""
    request_id = new_id(REQUEST)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    headers["x-request-id"] = headers["request-id"] = request_id
    if is_of_messages(request.url.path) or ANTHROPIC_VERSION in request.headers:
        body = anthropic_error(error, request_id)
    else:
        body = error_object(error)
    return JSONResponse(body, int(error.status), headers)


async def _tollhouse_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TollhouseError)
    return error_response(request, error)


async def _data_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DataError)
    refused = unstorable(error)
    log.warning("%s: %s", request.url.path, refused.message)
    return error_response(request, refused)


async def _operational_error(request: Request, error: Exception) -> JSONResponse:
    """The database is away, locked, or its disk is full: nothing that the request could change."""
    assert isinstance(error, OperationalError)
    if "disk is full" in str(error.orig) or getattr(error.orig, "sqlstate", "") == "53100":
        return error_response(request, _disk_full(request))
    log.error("%s: the database failed: %s", request.url.path, str(error).partition("\n")[0])
    return error_response(
        request,
        DependencyDown(
            "The database does not answer.", next_step="Try again shortly.", retry_after_s=2.0
        ),
    )


async def _os_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OSError)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error_response(request, _disk_full(request))
    return await _unhandled(request, error)


def _disk_full(request: Request) -> DependencyDown:
    log.error("%s: the disk is full", request.url.path)
    return DependencyDown(
        "The gateway cannot store this: its disk is full.",
        next_step="Try again later; the operator frees space in TOLLHOUSE_DATA_DIR.",
        code="storage_unavailable",
        retry_after_s=5.0,
    )


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return error_response(
        request,
        BadRequest(f"{where}: {first['msg']}.", next_step="Correct it; see /docs.", param=where),
    )


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    # Also where another method has a route; TRACE is of no endpoint.
    named = _unsupported(request) if request.method != "TRACE" else None
    if named is not None or error.status_code == 404:
        return error_response(request, named or _no_such_path(request))
    mapped = TollhouseError(f"{error.detail}.", code="http_error")
    allowed = ""
    if error.status_code == 405:
        allowed = _allowed(request)
        mapped = TollhouseError(
            f"{request.url.path} does not take {request.method}.",
            next_step=f"Use {allowed}." if allowed else "See /docs.",
            code="method_not_allowed",
        )
    mapped.status, mapped.type = error.status_code, BadRequest.type
    response = error_response(request, mapped)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["Allow"] = allowed
    return response


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def _allowed(request: Request) -> str:
    """The methods of all routes of the path: the framework names those of the first one."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    methods = [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]
    return ", ".join(sorted(methods))


def _no_such_path(request: Request) -> NotFound:
    """Most of these requests have a base URL with one `/v1` too few or too many."""
    path = "/" + request.url.path.strip("/")
    tried = path.removeprefix("/v1") if path.startswith("/v1/v1/") else path
    if not tried.startswith("/v1"):
        tried = f"/v1{tried}"
    known = [route for route in _paths(request) if route.startswith("/v1/")]
    near = difflib.get_close_matches(tried, known, 1, cutoff=0.85)
    hint = f"Did you mean {near[0]}?" if near else "See /docs."
    if near and path.startswith("/v1/v1/"):
        hint += " This SDK adds /v1 itself: remove it from the base URL."
    elif near and near[0] == f"/v1{path}":
        hint += " End the base URL with /v1."
    return NotFound(f"There is no {request.url.path[:200]}.", next_step=hint)


def _unsupported(request: Request) -> NotFound | None:
    path = "/" + request.url.path.strip("/")
    for endpoint in _UNSUPPORTED:
        if path == endpoint or path.startswith(f"{endpoint}/"):
            return unsupported_endpoint(endpoint)
    return None


def unsupported_endpoint(path: str) -> NotFound:
    return NotFound(
        f"{path} is not supported by this gateway.",
        next_step="Send these requests to a server that has it; for what is served, see /docs.",
        code="unsupported_endpoint",
    )


def _paths(request: Request) -> list[str]:
    return list(request.app.openapi()["paths"])


async def _unhandled(request: Request, error: Exception) -> JSONResponse:
    log.error("unhandled exception in %s", request.url.path, exc_info=error)
    return error_response(
        request,
        TollhouseError("The gateway failed to process this request.", next_step="Try again."),
    )
