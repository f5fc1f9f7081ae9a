"""The exchange of a background response: its events are kept, and no connection ends it."""

import asyncio
from collections.abc import Callable, Iterable

from core.tenants.keys import Principal
from gateway.request.exchange import ClientDisconnected, Exchange, Headers


class BackgroundExchange(Exchange):
    def __init__(self, outer: Exchange, principal: Principal, body: bytes, request_id: str) -> None:
        self.scope, self.headers, self.repeated = outer.scope, outer.headers, outer.repeated
        self.principal = principal
        self.request_id = request_id
        self.started = self.disconnected = False
        self.events: list[bytes] = []  # server-sent events, each whole
        self.response_headers: Headers = []
        self.refusal: tuple[int, Headers, bytes] | None = None  # an error in place of events
        self.admitted = asyncio.Event()  # past the limits and the screening, or refused
        self._body = body
        self._changed = asyncio.Event()
        self._disconnect: Callable[[], None] | None = None

    async def body(self, limit: int) -> bytes:
        return self._body

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._disconnect = callback
        self.admitted.set()

    def disconnect(self) -> None:
        """Ends the request as if its client had left: what it has generated is charged."""
        self.disconnected = True
        if self._disconnect is not None:
            self._disconnect()

    def done(self) -> None:
        self._disconnect = None
        self.admitted.set()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.response_headers = headers

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if self.disconnected:
            raise ClientDisconnected
        self.add(each + b"\n\n" for each in data.split(b"\n\n") if each.startswith(b"event: "))

    def add(self, events: Iterable[bytes]) -> None:
        self.events += events
        self.notify()

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change(self) -> None:
        """Waits for more events, or the end."""
        await self._changed.wait()

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.started = True
        self.refusal = (status, headers, body)
