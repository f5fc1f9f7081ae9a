"""An exchange without a connection, for requests that the batch runner sends on behalf of a key."""

from collections.abc import Callable
from typing import Any

from core.batches.jobs import LineResult
from core.tenants.keys import Principal
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
