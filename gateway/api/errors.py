"""Errors of the FastAPI side in OpenAI's shape, with a request id and no traceback."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from core.errors import BadRequest, NotFound, TollhouseError
from core.ids import REQUEST, new_id
from gateway.request_headers import refusal_headers
from gateway.surfaces.openai_errors import error_object

log = logging.getLogger("tollhouse.api")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TollhouseError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _fault)


def answer(error: TollhouseError) -> JSONResponse:
    headers = {name.decode(): value.decode() for name, value in refusal_headers(error)}
    headers["x-request-id"] = new_id(REQUEST)
    return JSONResponse(error_object(error), int(error.status), headers)


async def _ours(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TollhouseError)
    return answer(error)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return answer(
        BadRequest(
            f"{where}: {first['msg']}.", next_step="Correct it; /docs has the form.", param=where
        )
    )


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return answer(NotFound(f"There is no {request.url.path}.", next_step="See /docs."))
    made = TollhouseError(f"{error.detail}.", code="http_error")
    made.status, made.type = error.status_code, BadRequest.type
    response = answer(made)
    response.headers.update(error.headers or {})
    return response


async def _fault(request: Request, error: Exception) -> JSONResponse:
    log.error("%s failed by our fault", request.url.path, exc_info=error)
    return answer(TollhouseError("The gateway failed at this request.", next_step="Try again."))
