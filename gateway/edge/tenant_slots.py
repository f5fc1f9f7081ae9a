"""Shares of tenants in the threads of synchronous routes, which all routes use together.

The share is taken once the tenant is known, before the route gets a thread, and given back when its
response begins, so that a client that reads slowly holds none.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Request

from core.tenant_slots import TenantSlots

_SLOT = "tollhouse.tenant_slot"
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class ReleaseSlots:
    """The middleware that gives a slot back."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[Callable[[], None]] = []
        scope[_SLOT] = held

        async def _send(message: Message) -> None:
            _release(held)
            await send(message)

        try:
            await self._app(scope, receive, _send)
        finally:
            _release(held)


async def take_slot(request: Request, tenant_id: str) -> None:
    """Wait for a thread of the tenant's share, if the route needs one and has none yet."""
    held = request.scope.get(_SLOT)
    endpoint = request.scope.get("endpoint")
    if held is None or held or endpoint is None or asyncio.iscoroutinefunction(endpoint):
        return
    slots: TenantSlots = request.app.state.tenant_slots
    held.append(await slots.take(tenant_id))


def _release(held: list[Callable[[], None]]) -> None:
    while held:
        held.pop()()
