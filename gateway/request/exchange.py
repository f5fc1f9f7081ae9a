"""One HTTP request and response on ASGI, with body limits and disconnect detection."""

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from core.batches.jobs import LineResult
from core.errors import BadRequest, PayloadTooLarge, TollhouseError
from core.tenants.keys import Principal

Scope = dict[str, Any]
Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
GZIP = (b"gzip", b"x-gzip")
BODY_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 60.0  # a client that reads nothing for this long is disconnected


class ClientDisconnected(Exception):
    """The client closed the connection or stopped reading."""


class Exchange:
    principal: Principal | None = None  # set for internal requests, such as batch lines
    batch_job: str | None = None  # id of the batch that the request belongs to
    # Builds the result of the batch line from the request id and the response.
    batch_line: Callable[[str, dict[str, Any]], LineResult] | None = None
    request_id: str | None = None  # set where the id is known before the request runs
    broken = False  # the request failed after the response had started

    def __init__(self, scope: Scope, receive: Any, send: Any) -> None:
        self.scope = scope
        self.started = False
        self.disconnected = False
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Future[Any] | None = None
        self._disconnect_callback: Callable[[], None] | None = None
        listed: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[bytes, bytes] = dict(listed)
        self.repeated: frozenset[bytes] = frozenset()
        if len(self.headers) != len(listed):
            names = Counter(name for name, _ in listed)
            self.repeated = frozenset(name for name, count in names.items() if count > 1)

    @property
    def address(self) -> str:
        client = self.scope.get("client")
        return str(client[0]) if client else ""

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else None

    async def body(self, limit: int) -> bytes:
        encoding = self.headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"identity", *GZIP):
            raise BadRequest(
                f"Content-Encoding {encoding[:40].decode('latin-1')!r} is not supported.",
                next_step="Send the body with Content-Encoding gzip, or without one.",
                code="unsupported_encoding",
            )
        length = self.headers.get(b"content-length", b"0")
        if (length.isascii() and length.isdigit()) and int(length) > limit:
            raise too_large(limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read(limit)
        except TimeoutError:
            raise body_too_slow(BODY_TIMEOUT_S) from None
        return await asyncio.to_thread(_unpacked, body, limit) if encoding in GZIP else body

    async def _read(self, limit: int) -> bytes:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise too_large(limit)
            return body
        parts, size = [], 0
        while True:
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise ClientDisconnected
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)
            message = await self._receive()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Runs `callback` once, in the event loop turn in which the disconnect is detected. A later
        call replaces the callback."""
        self._disconnect_callback = callback
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._receive())
            self._watcher.add_done_callback(self._on_message)
        elif self.disconnected:
            asyncio.get_running_loop().call_soon(callback)

    def _on_message(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            self.disconnected = True
            if self._disconnect_callback is not None:
                self._disconnect_callback()

    def done(self) -> None:
        if self._watcher is not None and not self._watcher.done():
            self._watcher.cancel()
            self._watcher = None

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if self.disconnected:
            raise ClientDisconnected
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError):
            self.disconnected = True
        if self.disconnected:
            raise ClientDisconnected

    @property
    def unsent(self) -> int | None:
        """Bytes that the client has not taken; None where that is not known."""
        return None

    @property
    def writable(self) -> bool:
        """Whether `write_now` may be called."""
        return False

    def write_now(self, data: bytes) -> None:
        """Write a part of a body that has begun, without waiting."""
        raise NotImplementedError

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        full = [*headers, JSON, (b"content-length", str(len(body)).encode())]
        await self.start(status, full)
        await self.write(body, more=False)


def _unpacked(body: bytes, limit: int) -> bytes:
    """A gzip body's content, of which never more than `limit` bytes are in memory."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise _not_gzip(str(error)) from None
    if len(content) > limit:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise _not_gzip("it ends too early or too late")
    return content


def _not_gzip(problem: str) -> BadRequest:
    return BadRequest(
        f"The body is not valid gzip: {problem}.",
        next_step="Compress the whole body once, or send it without Content-Encoding.",
        code="invalid_encoding",
    )


def body_too_slow(seconds: float) -> TollhouseError:
    error = BadRequest(
        f"The body did not arrive within {seconds:.0f} seconds.",
        next_step="Send the whole body without pausing.",
        code="body_timeout",
    )
    error.status = HTTPStatus.REQUEST_TIMEOUT
    return error


def too_large(limit: int) -> TollhouseError:
    return PayloadTooLarge(
        f"The body is larger than {limit // 2**20} MiB.",
        next_step="Send a smaller body; the operator can raise TOLLHOUSE_MAX_BODY_MB.",
    )
