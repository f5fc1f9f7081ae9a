"""uvicorn's httptools protocol with limits on headers and bodies, which uvicorn lacks, and a direct
path to the inference routes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from itertools import chain
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.edge.body_limits import LINGER_S, BodyLimit, BodyLimits
from gateway.edge.client_address import TrustedProxies
from gateway.edge.direct import DirectCycle, DirectExchange
from gateway.request import exchange
from gateway.request.exchange import Exchange

log = logging.getLogger("tollhouse.http")
MAX_HEADERS = 65_536  # bytes of one request's head
HEAD_TIMEOUT_S = 30.0  # for a request's head, from the connection or from its first byte
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 120\r\n\r\n"
    b'{"error":{"message":"The headers are larger than 64 KiB.",'
    b'"type":"invalid_request_error","param":null,"code":"headers"}}'
)
_TWO_HOSTS = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 129\r\n\r\n"
    b'{"error":{"message":"The request has more than one Host header.",'
    b'"type":"invalid_request_error","param":"host","code":"headers"}}'
)
# Headers that uvicorn, or a middleware (CORS), must handle.
_UVICORN_HEADERS = frozenset((b"expect", b"origin"))
_VERSIONS = ("1.1", "1.0")
ExchangeHandler = Callable[[Exchange], Coroutine[Any, Any, None]]


class BoundedHttp(HttpToolsProtocol):
    """Passes POST requests for the paths in the app's `direct_routes` directly to their handlers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._direct_routes: Mapping[bytes, ExchangeHandler] = getattr(
            self.config.app, "direct_routes", {}
        )
        self._proxies: TrustedProxies | None = getattr(self.config.app, "trusted_proxies", None)
        self._body_limits: BodyLimits | None = getattr(self.config.app, "body_limits", None)
        self._body_limit: BodyLimit | None = None
        self._body_bytes = 0
        self._body_timer: asyncio.TimerHandle | None = None
        self._body_started = 0.0
        self._idle_since: float | None = None  # since the last response; None while a request runs
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        """Close the connection, so that a slow sender cannot hold it open (Slowloris)."""
        self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if sum(map(len, chain.from_iterable(self.headers))) > MAX_HEADERS:
            self._refuse(_TOO_LARGE)
            return
        listed = self.headers
        fields = dict(listed)  # a second content-length is an error of the parser
        if len(fields) < len(listed) and sum([name == b"host" for name, _ in listed]) > 1:
            self._refuse(_TWO_HOSTS)
            return
        if not self._expect_body(fields):
            return
        if self._proxies is not None and self.client is not None:
            self._resolve_client(self._proxies, self.client[0], listed)
        handler = self._direct_routes.get(self.url)
        if handler is None or not self._is_simple(fields):
            super().on_headers_complete()
            self._drop_trailers()
            return
        self._drop_trailers()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["method"] = "POST"
        scope["http_version"] = self.parser.get_http_version()
        scope["path"] = self.url.decode("ascii")
        self.cycle = cycle = DirectCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        task = self.loop.create_task(handler(DirectExchange(scope, cycle)))
        task.add_done_callback(self._served)
        self.tasks.add(task)

    def _drop_trailers(self) -> None:
        """Fields behind a chunked body go to a list that nobody reads: the head was checked without
        them."""
        self.headers = []

    def _resolve_client(
        self, proxies: TrustedProxies, peer: str, listed: list[tuple[bytes, bytes]]
    ) -> None:
        if not proxies.trusts(peer):
            return
        client = proxies.client_of(peer, listed)
        if client != peer:
            self.scope["client"] = (client, 0)
        self.scope["scheme"] = proxies.scheme_of(peer, listed, self.scope["scheme"])

    def _expect_body(self, fields: Mapping[bytes, bytes]) -> bool:
        """Begins to watch the request's body. False if its declared length is refused."""
        if self._body_limits is None:
            return True
        length = fields.get(b"content-length", b"")
        if length in (b"", b"0") and b"transfer-encoding" not in fields:
            return True
        self._body_limit = limit = self._body_limits.of(self.url.partition(b"?")[0])
        if limit.refuses_length(length):
            self._refuse(limit.too_large())
            return False
        self._body_started = self.loop.time()
        return True

    def _await_body(self) -> None:
        self._body_timer = self.loop.call_later(exchange.BODY_TIMEOUT_S, self._body_is_late)

    def _body_is_late(self) -> None:
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return
        assert self._body_limit is not None
        # Reading pauses while the gateway is behind, which is not the client's fault.
        elapsed_s = self.loop.time() - self._body_started
        if self.flow.read_paused or not self._body_limit.is_late(self._body_bytes, elapsed_s):
            self._await_body()
            return
        self._refuse(self._body_limit.too_slow(), in_head=False)

    def _body_ended(self) -> None:
        self._body_limit = None
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def on_response_complete(self) -> None:
        """As uvicorn's, with one timer for a connection in place of one for each response."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._await_request(self.timeout_keep_alive)

    def _await_request(self, seconds: float) -> None:
        self._idle_timer = self.loop.call_later(seconds, self._request_is_late)

    def _request_is_late(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return  # the end of the request that runs sets the timer again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._await_request(left)
        else:
            self.timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._body_ended()
        if self._head_timer is not None:
            self._head_timer.cancel()
        if isinstance(self.cycle, DirectCycle) and self.cycle.disconnect_callback is not None:
            self.cycle.disconnect_callback()

    def _is_simple(self, fields: Mapping[bytes, bytes]) -> bool:
        """Whether the request needs none of uvicorn's other features or middleware."""
        return (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() in _VERSIONS
            and not self.parser.should_upgrade()
            and (self.cycle is None or self.cycle.response_complete)
            and self.limit_concurrency is None
            and _UVICORN_HEADERS.isdisjoint(fields)
        )

    def _served(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            if not task.cancelled():
                log.error("unhandled exception in an exchange", exc_info=task.exception())
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(body)
        if self._body_limit is not None and self._body_limit.refuses(self._body_bytes):
            self._refuse(self._body_limit.too_large(), in_head=False)
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_ended()
        if not self._refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._idle_since = None
        super().data_received(data)
        if self._body_limit is not None and self._body_timer is None:
            self._await_body()  # most bodies come with their head, and need no timer
        if self._in_head and not self._refused:
            # The head is incomplete, and its bytes so far are held in memory.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADERS:
                self._refuse(_TOO_LARGE)
            elif self._head_timer is None:
                self._await_head()

    _refused = False

    def _refuse(self, answer: bytes, *, in_head: bool = True) -> None:
        """Answer and end the connection. What the client sends from now on is discarded, for a while:
        a connection that closes with unread data resets, and the client would not see the answer."""
        self._refused = True
        self._body_ended()
        cycle = self.cycle
        if in_head:  # `cycle` is the previous request's
            answerable = cycle is None or cycle.response_complete
        else:
            answerable = not (cycle.response_started or self.pipeline)
        if answerable:
            self.transport.write(answer)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its handler gets a disconnect, and sends nothing more
            cycle.message_event.set()
            if isinstance(cycle, DirectCycle) and cycle.disconnect_callback is not None:
                cycle.disconnect_callback()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
