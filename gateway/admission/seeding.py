"""Enters what is spent under a budget or from a wallet into counters that lack it: after a new window,
a new budget, a restart without Redis, or a Redis that lost its data.

Nothing is admitted on such an account before its spend is rebuilt: from the roll-ups, from stored usage
that is not rated, and from this machine's spools, which are shipped first. Other gateways have
`SETTLE_S` to ship theirs and to enter the reservations of their running requests again (`Leases.run`).
What is settled in that time may count twice: a cap is then reached early, never late.
"""

import asyncio
from collections.abc import Awaitable, Callable

from core.counters import Counters, nano_ceil
from core.errors import DependencyDown
from gateway.admission.prices import Owner, PriceList
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import Reservation, caps_of

SETTLE_S = 3.0  # a gateway ships within 1.5 s, and looks for lost data every 0.5 s
_LONGEST_S = 30.0


class Seeding:
    def __init__(
        self,
        counters: Counters,
        prices: PriceList,
        *,
        settle_s: float,
        stored: Callable[[], Awaitable[None]],
    ) -> None:
        """`stored` returns once the usage that this machine has recorded is in the database.
        `settle_s` is 0 where no other process uses the counters."""
        self._counters = counters
        self._prices = prices
        self._settle_s = settle_s
        self._stored = stored
        self._running: dict[Owner, asyncio.Task[None]] = {}

    async def seed(self, request: AdmissionRequest) -> None:
        """Requests of one key wait for the same rebuild. DependencyDown if it cannot be done now."""
        owner = self._prices.owner_of(request)
        task = self._running.get(owner)
        if task is None:
            task = self._running[owner] = asyncio.create_task(self._seed(owner))
            task.add_done_callback(lambda _: self._running.pop(owner, None))
        await asyncio.shield(task)

    async def recover(self, reservation: Reservation) -> None:
        """Enter a running request's reservation again, and seed its accounts."""
        bucket_request = reservation.planned.bucket_request
        await self._counters.restore(bucket_request, nano_ceil(reservation.held_units))
        await self.seed(reservation.request)

    async def _seed(self, owner: Owner) -> None:
        try:
            async with asyncio.timeout(_LONGEST_S):
                began, now = await self._counters.born()
                await asyncio.sleep(max(0.0, self._settle_s - (now - began) / 1000))
                await self._stored()
                limits = await self._prices.read_limits(owner)
        except TimeoutError:
            raise DependencyDown(
                "Spend cannot be checked: recent usage is not stored yet.",
                next_step="Try again shortly. Operators: check the database.",
                retry_after_s=2.0,
            ) from None
        await self._counters.seed(owner[0], caps_of(limits))
