"""Request headers besides authentication, and the headers of every response."""

from datetime import datetime

from msgspec import Struct

from core.errors import BadRequest, TollhouseError
from core.tenants.plans import Plan
from gateway.exchange import Exchange, Headers
from gateway.limits.admission import LimitState
from gateway.limits.headers import (
    anthropic_headers,
    ietf_headers,
    openai_headers,
    own_headers,
    retry_headers,
)
from gateway.limits.limiter import is_final


class Told(Struct, frozen=True):
    """Options from request headers. `client_request_id` is for correlation, never a key."""

    timeout_s: float
    client_request_id: str | None


def read_told(exchange: Exchange, longest_s: float) -> Told:
    timeout_s = longest_s
    given = exchange.header(b"x-request-timeout-ms")
    if given is not None:
        if not given.isascii() or not given.isdigit() or len(given) > 9 or int(given) == 0:
            raise BadRequest(
                "x-request-timeout-ms must be a whole number of milliseconds above 0.",
                param="x-request-timeout-ms",
                code="invalid_value",
            )
        timeout_s = min(longest_s, int(given) / 1000)
    client_id = exchange.header(b"x-request-id")
    if client_id is not None and (len(client_id) > 128 or not client_id.isprintable()):
        raise BadRequest(
            "x-request-id must be at most 128 printable characters.",
            param="x-request-id",
            code="invalid_value",
        )
    return Told(timeout_s, client_id)


def answer_headers(request_id: str, millis: int, extra: Headers) -> Headers:
    own = request_id.encode()
    return [
        (b"x-request-id", own),
        (b"request-id", own),
        (b"openai-processing-ms", str(millis).encode()),
        (b"openai-version", b"2020-10-01"),
        *extra,
    ]


def limit_headers(style: str, state: LimitState, plan: Plan | None, now: datetime) -> Headers:
    """The rate limit headers of the surface's API style."""
    if style == "anthropic":
        found = anthropic_headers(state.buckets, now)
    else:
        found = openai_headers(state.buckets)
    found |= ietf_headers(state.buckets)
    if plan is not None:
        found |= own_headers(plan, mode=state.mode, queued_ms=state.queued_ms, shadow=state.shadow)
    return [(name.encode(), value.encode()) for name, value in found.items()]


def refusal_headers(error: TollhouseError) -> Headers:
    """Whether and when the client may retry."""
    found = retry_headers(error.retry_after_s)
    if is_final(error) or error.code == "deadline_exceeded":
        found["x-should-retry"] = "false"
    return [(name.encode(), value.encode()) for name, value in found.items()]
