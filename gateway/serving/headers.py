"""Request headers besides authentication, and the headers of every response."""

from datetime import datetime
from functools import lru_cache
from http import HTTPStatus

from msgspec import Struct

from core import lengths
from core.errors import BadRequest, TollhouseError
from core.tenants.operator import is_operator_token
from core.tenants.plans import Plan
from gateway.admission.headers import (
    bucket_headers,
    retry_headers,
    tollhouse_headers,
)
from gateway.admission.rejections import is_final
from gateway.admission.request import LimitState
from gateway.request.exchange import Exchange, Headers

WARM_UP_HEADER = "x-tollhouse-warm-up"  # its value is the operator's token
_WARM_UP = WARM_UP_HEADER.encode()
_OPTIONS = frozenset((b"x-request-timeout-ms", b"x-request-id", _WARM_UP))


class RequestOptions(Struct, frozen=True):
    """Options from request headers. `client_request_id` is for correlation, never a key."""

    timeout_s: float
    client_request_id: str | None
    is_warm_up: bool = False  # the start's own request: nobody is charged for it


def read_options(exchange: Exchange, max_timeout_s: float, operator_token: str) -> RequestOptions:
    if _OPTIONS.isdisjoint(exchange.headers):
        return _default_options(max_timeout_s)
    timeout_s = max_timeout_s
    value = exchange.header(b"x-request-timeout-ms")
    if value is not None:
        if not value.isascii() or not value.isdigit() or len(value) > 9 or int(value) == 0:
            raise BadRequest(
                "x-request-timeout-ms must be a whole number of milliseconds above 0.",
                param="x-request-timeout-ms",
                code="invalid_value",
            )
        timeout_s = min(max_timeout_s, int(value) / 1000)
    client_id = exchange.header(b"x-request-id")
    longest = lengths.CLIENT_REQUEST_ID
    if client_id is not None and (len(client_id) > longest or not client_id.isprintable()):
        raise BadRequest(
            f"x-request-id must be at most {longest} printable characters.",
            param="x-request-id",
            code="invalid_value",
        )
    token = exchange.header(_WARM_UP)
    is_warm_up = token is not None and is_operator_token(operator_token, token)
    return RequestOptions(timeout_s, client_id, is_warm_up)


def with_client_id(options: RequestOptions, given: str | None) -> RequestOptions:
    """The body's id for a request whose headers have none."""
    if given is None or options.client_request_id is not None:
        return options
    return RequestOptions(options.timeout_s, given, options.is_warm_up)


@lru_cache(maxsize=8)
def _default_options(timeout_s: float) -> RequestOptions:
    """Of a request that sets none: most of them."""
    return RequestOptions(timeout_s, None)


def response_headers(request_id: str, millis: int, extra: Headers) -> Headers:
    id_bytes = request_id.encode()
    return [
        (b"x-request-id", id_bytes),
        (b"request-id", id_bytes),
        (b"openai-processing-ms", str(millis).encode()),
        (b"openai-version", b"2020-10-01"),
        *extra,
    ]


def limit_headers(style: str, state: LimitState, plan: Plan | None, now: datetime) -> Headers:
    """The rate limit headers of the surface's API style."""
    headers = bucket_headers(style, state, now)
    if plan is not None:
        headers += tollhouse_headers(
            plan, mode=state.mode, queued_ms=state.queued_ms, shadow=state.shadow
        )
    return headers


def error_headers(error: TollhouseError) -> Headers:
    """Whether and when the client may retry; of a 401, how to authenticate."""
    headers = retry_headers(error.retry_after_s)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if is_final(error) or error.code == "deadline_exceeded":
        headers["x-should-retry"] = "false"
    return [(name.encode(), value.encode()) for name, value in headers.items()]
