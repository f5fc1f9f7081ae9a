"""uvicorn's httptools protocol with a limit on headers, which uvicorn lacks, and a direct path to
the inference routes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from itertools import chain
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.direct import DirectCycle, DirectExchange
from gateway.http.exchange import Exchange

log = logging.getLogger("tollhouse.http")
MAX_HEADERS = 65_536  # bytes of one request's head
HEAD_TIMEOUT_S = 30.0  # for a request's head, from the connection or from its first byte
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 120\r\n\r\n"
    b'{"error":{"message":"The headers are larger than 64 KiB.",'
    b'"type":"invalid_request_error","param":null,"code":"headers"}}'
)


# Headers that uvicorn or its proxy middleware must handle.
_PROXY_HEADERS = frozenset((b"x-forwarded-for", b"x-forwarded-proto", b"expect"))
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
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if sum(map(len, chain.from_iterable(self.headers))) > MAX_HEADERS:
            self._refuse()
            return
        handler = self._direct_routes.get(self.url)
        if handler is None or not self._is_simple():
            super().on_headers_complete()
            return
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["method"] = "POST"
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

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()
        if isinstance(self.cycle, DirectCycle) and self.cycle.disconnect_callback is not None:
            self.cycle.disconnect_callback()

    def _is_simple(self) -> bool:
        """Whether the request needs none of uvicorn's other features or middleware."""
        return (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
            and (self.cycle is None or self.cycle.response_complete)
            and self.limit_concurrency is None
            and _PROXY_HEADERS.isdisjoint([name for name, _ in self.headers])
        )

    def _served(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            if not task.cancelled():
                log.error("unhandled exception in an exchange", exc_info=task.exception())
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            # The head is incomplete, and its bytes so far are held in memory.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADERS:
                self._refuse()
            elif self._head_timer is None:
                self._await_head()

    _refused = False

    def _refuse(self) -> None:
        self._refused = True
        self.transport.write(_TOO_LARGE)
        self.transport.close()
