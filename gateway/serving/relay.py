"""An exchange in front of the client's own: the same connection, with a body that is known already."""

from collections.abc import Callable

from core.tenants.keys import Principal
from gateway.request.exchange import Exchange, Headers


class RelayExchange(Exchange):
    def __init__(self, outer: Exchange, principal: Principal, body: bytes) -> None:
        self._outer = outer
        self.scope, self.headers, self.repeated = outer.scope, outer.headers, outer.repeated
        self.principal = principal
        self._body = body

    @property
    def started(self) -> bool:  # type: ignore[override]
        return self._outer.started

    @property
    def disconnected(self) -> bool:  # type: ignore[override]
        return self._outer.disconnected

    @property
    def unsent(self) -> int | None:
        return self._outer.unsent

    @property
    def broken(self) -> bool:
        return self._outer.broken

    @broken.setter
    def broken(self, value: bool) -> None:
        self._outer.broken = value

    async def body(self, limit: int) -> bytes:
        return self._body

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._outer.on_disconnect(callback)

    def done(self) -> None:
        self._outer.done()

    async def start(self, status: int, headers: Headers) -> None:
        await self._outer.start(status, headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._outer.write(data, more=more)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self._outer.answer(status, headers, body)
