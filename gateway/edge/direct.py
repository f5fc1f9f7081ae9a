"""An exchange directly on uvicorn's connection, for the inference routes.

It bypasses ASGI because ASGI's messages, its watcher task and two writes per response take a third
of the time budget of a short request. Unusual requests (a chunked body, a proxy's headers) go
through ASGI with the same result.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.request.exchange import (
    JSON,
    WRITE_TIMEOUT_S,
    ClientDisconnected,
    Exchange,
    Headers,
    too_large,
)


class DirectCycle(RequestResponseCycle):
    """uvicorn's state of one request; `disconnect_callback` is called when the client disconnects."""

    disconnect_callback: Callable[[], None] | None = None

    def head(self, status: int, headers: Headers) -> bytes:
        """Status line and headers. A line break in a header raises ValueError (header injection)."""
        lines = [*self.default_headers, *headers]
        if not self.keep_alive:
            lines.append((b"connection", b"close"))
        written = STATUS_LINE[status] + b"\r\n".join(map(b": ".join, lines))
        if written.count(b"\n") != len(lines) or written.count(b"\r") != len(lines):
            raise ValueError("a header holds a line break")
        return written + b"\r\n\r\n"

    def finish(self) -> None:
        self.response_complete = True
        self.disconnect_callback = None
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


class DirectExchange(Exchange):
    def __init__(self, scope: Any, cycle: DirectCycle) -> None:
        super().__init__(scope, cycle.receive, cycle.send)
        self._cycle = cycle
        self._head = b""  # held back and written with the first chunk of the body
        self._chunked = (
            scope["http_version"] != "1.0"
        )  # otherwise the end of the connection ends it

    async def body(self, limit: int) -> bytes:
        cycle = self._cycle
        if cycle.more_body or b"content-encoding" in self.headers:
            return await super().body(limit)
        body = bytes(cycle.body)
        if len(body) > limit:
            raise too_large(limit)
        cycle.body = bytearray()
        return body

    def on_disconnect(self, call: Callable[[], None]) -> None:
        def _disconnected() -> None:
            self.disconnected = True
            call()

        self._cycle.disconnect_callback = _disconnected
        if self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(_disconnected)

    def done(self) -> None:
        self._cycle.disconnect_callback = None

    async def start(self, status: int, headers: Headers) -> None:
        self.started = self._cycle.response_started = True
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        else:
            self._cycle.keep_alive = False
        self._head = self._cycle.head(status, headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await cycle.flow.drain()
            except TimeoutError:
                self.disconnected = True
        if self.disconnected or cycle.disconnected:
            self.disconnected = True
            raise ClientDisconnected
        parts = [self._head]
        self._head = b""
        if not self._chunked:
            parts.append(data)
        elif data:
            parts += (b"%x\r\n" % len(data), data, b"\r\n")
        if not more and self._chunked:
            parts.append(b"0\r\n\r\n")
        cycle.transport.write(b"".join(parts))
        if not more:
            cycle.finish()

    @property
    def unsent(self) -> int | None:
        return self._cycle.transport.get_write_buffer_size()

    @property
    def writable(self) -> bool:
        """Whether the body has begun, and the client reads as fast as it gets."""
        cycle = self._cycle
        return not (
            self.disconnected
            or cycle.disconnected
            or cycle.flow.write_paused
            or self._head
            or cycle.response_complete
        )

    def write_now(self, data: bytes) -> None:
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._cycle.transport.write(data)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        cycle = self._cycle
        self.started = cycle.response_started = True
        if self.disconnected or cycle.disconnected:
            self.disconnected = True
            raise ClientDisconnected
        length = (b"content-length", b"%d" % len(body))
        cycle.transport.write(cycle.head(status, [*headers, JSON, length]) + body)
        cycle.finish()
