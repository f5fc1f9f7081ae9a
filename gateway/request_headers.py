"""The headers that a client may send beside its key, and those that every answer carries."""

from dataclasses import dataclass

from core.errors import BadRequest
from gateway.exchange import Exchange, Headers


@dataclass(frozen=True, slots=True)
class Told:
    """`client_request_id` is kept for correlation and is never a key."""

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
