"""One line of a batch: its exchange with the pipeline, and its line of the output or error file."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from core.batches.jobs import LineResult
from core.batches.models import BatchLine
from core.errors import TollhouseError
from core.tenants.keys import Principal
from core.tenants.plans import for_batches
from gateway.answers.surface import Surface
from gateway.edge.api_errors import error_object
from gateway.request.exchange import Exchange, Headers, too_large


class InternalExchange(Exchange):
    """`status`, `response_headers` and `content` hold the response once `serve` has returned."""

    def __init__(
        self,
        principal: Principal,
        body: bytes,
        batch_job: str,
        batch_line: Callable[[str, dict[str, Any]], LineResult],
    ) -> None:
        super().__init__({"headers": []}, None, None)
        self.principal = principal
        self.batch_job = batch_job
        self.batch_line = batch_line
        self.status = 0
        self.response_headers: dict[str, str] = {}
        self.content = b""
        self._body = body
        self._on_disconnect: Callable[[], None] | None = None

    async def body(self, limit: int) -> bytes:
        if len(self._body) > limit:
            raise too_large(limit)
        return self._body

    def on_disconnect(self, call: Callable[[], None]) -> None:
        self._on_disconnect = call

    def disconnect(self) -> None:
        """Cancel the request as if its client had disconnected."""
        self.disconnected = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    def done(self) -> None:
        self._on_disconnect = None

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        self.response_headers = {name.decode(): value.decode("latin-1") for name, value in headers}

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self.content += data


Serve = Callable[[Surface, Exchange], Awaitable[None]]
_LONGEST_PAUSE_S = 60.0
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
_WHY_UNRUN = {
    EXPIRED: "This request could not be run before the completion window ended.",
    CANCELLED: "This request was not run: the batch was cancelled before.",
}


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The request was limited or refused for capacity; the line is retried."""

    after_s: float


def exchange_for(principal: Principal, line: BatchLine) -> InternalExchange:
    """The exchange of a line, at batch priority."""
    batch_principal = replace(principal, plan=for_batches(principal.plan))
    record = partial(answered, line.number, line.custom_id, 200)
    return InternalExchange(batch_principal, line.body.encode(), line.batch_id, record)


def outcome(
    number: int, custom_id: str, exchange: InternalExchange
) -> LineResult | RetryLater | None:
    """None if the exchange was cancelled before it was answered."""
    if exchange.status == 0:
        return None
    body = orjson.loads(exchange.content) if exchange.content else {}
    ok = exchange.status < 400
    if (
        not ok
        and exchange.status in (429, 503)
        and exchange.response_headers.get("x-should-retry") != "false"
        and body.get("error", {}).get("code") != "request_too_large_for_limit"
    ):
        retry_after = exchange.response_headers.get("retry-after", "1")
        return RetryLater(min(_LONGEST_PAUSE_S, max(0.2, float(retry_after))))
    request_id = exchange.response_headers.get("x-request-id", "")
    return answered(number, custom_id, exchange.status, request_id, body)


def answered(
    number: int, custom_id: str, status: int, request_id: str, body: dict[str, Any]
) -> LineResult:
    ok = status < 400
    response = {"status_code": status, "request_id": request_id, "body": body}
    usage = body.get("usage") if ok else None
    return LineResult(
        number, ok, _line(request_id, custom_id, response, None), *_tokens(usage or {})
    )


def key_rejected(number: int, custom_id: str, error: TollhouseError) -> LineResult:
    """The result of a line whose API key is no longer accepted."""
    response = {"status_code": int(error.status), "request_id": "", "body": error_object(error)}
    return LineResult(number, False, _line("", custom_id, response, None))


def unrun(number: int, custom_id: str, code: str) -> LineResult:
    """The result of a line that did not run. `code`: EXPIRED or CANCELLED."""
    error = {"code": code, "message": _WHY_UNRUN[code]}
    return LineResult(number, False, _line("", custom_id, None, error))


def _line(
    request_id: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> str:
    return orjson.dumps(
        {
            "id": f"batch_{request_id or 'req_none'}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    ).decode()


def _tokens(usage: dict[str, Any]) -> tuple[int, int, int]:
    """(input, cached, output), read from the field names of each API."""
    read = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    written = usage.get("completion_tokens", usage.get("output_tokens", 0))
    if "cache_read_input_tokens" in usage:  # Anthropic's input tokens exclude the cached ones
        cached = usage["cache_read_input_tokens"]
        return read + cached, cached, written
    return read, details.get("cached_tokens", 0), written
