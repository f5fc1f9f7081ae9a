"""Slots for the lines of batches, shared fairly between tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.fair_queue import FairQueue


class FairSlots:
    """`count` holders at once. Tenants that wait take turns, however many lines each has waiting."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def hold(self, tenant_id: str) -> AsyncIterator[None]:
        await self._acquire(tenant_id)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant_id: str) -> None:
        if self._free and not len(self._queue):
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(tenant_id, 1, 1, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise
        finally:
            self._queue.remove(ticket)

    def _release(self) -> None:
        while len(self._queue):
            ticket = self._queue.heads()[0]
            self._queue.serve(ticket)
            if not ticket.item.done():
                ticket.item.set_result(None)
                return
        self._free += 1
