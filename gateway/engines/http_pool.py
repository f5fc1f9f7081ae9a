"""An HTTP/1.1 client for one server, with a connection pool. Responses are streamed to a receiver.

It uses httptools rather than aiohttp because aiohttp's session, task and stream reader per call
cost more than all of admission. It supports only what an engine's API needs: POST, without
redirects, compression or proxies.

A request is sent once. A generation is not idempotent, and a server that closes the connection
without an answer may have run it, so only an idle connection that was closed before anything was
written to it is replaced by another.
"""

import asyncio
import select
import ssl
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import lru_cache
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0
_FRAMING = (b"content-length", b"transfer-encoding")
_LENGTHS_READ = frozenset(
    map(len, (b"content-type", b"retry-after", *_FRAMING))
)  # of the names of headers
# Uvicorn, Node and llama.cpp close a connection that was idle for 5 s. One that closes while a
# request is on its way fails that request.
_IDLE_S = 4.0


class Receiver(Protocol):
    """Callbacks for one call. `on_end` or `on_error` is the last."""

    def on_headers(self, status: int, content_type: str, retry_after: str) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class ServerDisconnected(ConnectionError):
    """The server closed the connection before the end of the response."""


class HttpPool:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        """`url` is scheme, host, port and an optional path prefix; `headers` go with every call."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").encode("ascii")
        all_headers = {
            "host": parts.netloc.rpartition("@")[2],
            "accept-encoding": "identity",
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        if lines.count("\n") != len(all_headers):
            raise ValueError("a header of an upstream holds a line break")
        self._headers = lines.encode("latin-1")
        self._heads: dict[str, bytes] = {}  # of a request, by path, up to its length
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        # Called with an answer's status, its headers of these names, and its retry-after.
        self.watched: frozenset[bytes] = frozenset()
        self.on_watched: Callable[[int, dict[bytes, bytes], str], None] | None = None
        self.last_byte_at = 0.0  # monotonic time of the last byte received

    async def post(
        self, path: str, body: bytes, receiver: Receiver, headers: bytes = b""
    ) -> Callable[[], None]:
        """Send a request whose response goes to `receiver`. Returns a function that cancels the call.
        `headers`: lines of this call alone, each with its end.

        Raises OSError or TimeoutError if no connection can be made.
        """
        head = self._heads.get(path)
        if head is None:
            line = b"POST %b%b HTTP/1.1\r\n" % (self._prefix, path.encode("ascii"))
            head = self._heads[path] = line + self._headers + b"content-length: "
        call = Call(receiver, b"%b%d\r\n%b\r\n%b" % (head, len(body), headers, body))
        connection = self._idle_connection()
        if connection is None:
            self._dispatch(call, await self._connect())
        else:
            connection.send(call)
        return call.terminate

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def release(self, connection: "Connection") -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def discard(self, connection: "Connection") -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _dispatch(self, call: "Call", connection: "Connection") -> None:
        if call.over:
            self.release(connection)
        else:
            connection.send(call)

    def _idle_connection(self) -> "Connection | None":
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _IDLE_S and connection.usable():
                return connection
            connection.close()
        return None

    async def _connect(self) -> "Connection":
        async with asyncio.timeout(CONNECT_S):
            # The connection outlives the request that opens it, so it has no context of that request.
            _, connection = await asyncio.create_task(
                asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls
                ),
                context=Context(),
            )
        self._connections.add(connection)
        return connection


class Call:
    """One request and the receiver of its response."""

    def __init__(self, receiver: Receiver, request: bytes) -> None:
        self.receiver = receiver
        # A connection serves many requests, and log lines have the id of this one's context.
        self.run = copy_context().run
        self.request = request
        self.connection: Connection | None = None
        self.over = False

    def terminate(self) -> None:
        """Cancel: close the connection; the receiver gets no more callbacks."""
        self.over = True
        if self.connection is not None:
            self.connection.close()

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.over = True
            self.run(self.receiver.on_error, error)


class Connection(asyncio.Protocol):
    """A connection, which carries one call at a time."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._readable = select.poll()
        self._call: Call | None = None
        self._received = False  # a byte of the response was received
        self._framed = False  # the response has a content-length or is chunked
        self._content_type = self._retry_after = ""
        self._watched: dict[bytes, bytes] = {}
        self.idle_since = 0.0

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def usable(self) -> bool:
        """Whether an idle connection takes another request. Whatever the server sent meanwhile ends
        it: its close, which the event loop may not have read yet, or bytes that no call asked for."""
        return not self.closing and not self._readable.poll(0)

    def send(self, call: Call) -> None:
        assert self._transport is not None
        self._call, call.connection = call, self
        self._received = self._framed = False
        self._transport.write(call.request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses
        self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        self._received = True
        self._pool.last_byte_at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ServerDisconnected(f"its answer is not HTTP ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.discard(self)
        call, self._call = self._call, None
        if call is None or call.over:
            return
        call.connection = None
        if self._received and not self._framed and exc is None:
            call.over = True  # a response without a length ends with its connection
            call.run(call.receiver.on_end)
        else:
            call.fail(ServerDisconnected(str(exc) if exc else "it closed the connection"))

    def on_message_begin(self) -> None:
        self._content_type = self._retry_after = ""
        self._watched = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._pool.watched and (watched := name.lower()) in self._pool.watched:
            self._watched[watched] = value
            return
        if len(name) not in _LENGTHS_READ:
            return
        lowered = name.lower()
        if lowered == b"content-type":
            self._content_type = _media_type(value)
        elif lowered == b"retry-after":
            self._retry_after = value.decode("latin-1").strip()
        elif lowered in _FRAMING:
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._pool.on_watched is not None:
            self._pool.on_watched(status, self._watched, self._retry_after)
        if status >= 200 and self._call is not None and not self._call.over:
            self._call.receiver.on_headers(status, self._content_type, self._retry_after)

    def on_body(self, data: bytes) -> None:
        if self._call is not None and not self._call.over:
            self._call.run(self._call.receiver.on_data, data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        call, self._call = self._call, None
        if self._parser.should_keep_alive() and call is not None and not self.closing:
            self._pool.release(self)
        else:
            self.close()
        if call is not None and not call.over:
            call.over, call.connection = True, None
            call.run(call.receiver.on_end)

    def _fail(self, error: Exception) -> None:
        call, self._call = self._call, None
        self.close()
        if call is not None:
            call.fail(error)


@lru_cache(maxsize=64)
def _media_type(value: bytes) -> str:
    return value.decode("latin-1").partition(";")[0].strip().lower()
