"""How many calls of one tenant a process serves at a time on routes whose work blocks a thread."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class TenantSlots:
    """Calls over `each` of a tenant wait, outside of any thread, until one of its others has ended."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._slots: dict[str, tuple[asyncio.Semaphore, int]] = {}  # and how many hold or wait

    async def take(self, tenant: str) -> Callable[[], None]:
        """Returns what gives the slot back; a second call of it does nothing."""
        slots, users = self._slots.get(tenant) or (asyncio.Semaphore(self._each), 0)
        self._slots[tenant] = slots, users + 1
        try:
            await slots.acquire()
        except BaseException:
            self._forget(tenant)
            raise
        is_held = True

        def _release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                slots.release()
                self._forget(tenant)

        return _release

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        release = await self.take(tenant)
        try:
            yield
        finally:
            release()

    def _forget(self, tenant: str) -> None:
        slots, users = self._slots[tenant]
        if users == 1:
            del self._slots[tenant]
        else:
            self._slots[tenant] = slots, users - 1
