"""The limits in an upstream's entry, counted over all gateway processes that share counters."""

import asyncio

from core.clock import Clock
from core.counters import Counters, Denial, Slot, Take, Wish
from core.counters_memory import MemoryCounters
from core.errors import RateLimited, TollhouseError, Unavailable
from core.ids import new_id
from gateway.engines.upstreams import Upstream
from gateway.limits.leases import Leases
from gateway.limits.wishes import LEASE_MS

_FULL_WAIT_S = 1.0  # retry-after when full: it is unknown when a running request ends


class UpstreamLimits:
    """The limits of one upstream. While the shared counters are down, each process applies its share."""

    def __init__(
        self, upstream: Upstream, counters: Counters, clock: Clock, *, processes: int = 1
    ) -> None:
        self._group = f"upstream:{upstream.place}"
        self._most = upstream.max_in_flight
        self._per_minute = upstream.requests_per_minute
        self._shared = counters
        self._local = MemoryCounters(clock)
        self._processes = max(1, processes)
        self._leases = Leases()
        self._keeper: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._most or self._per_minute)

    def start(self) -> None:
        if self._most:
            self._keeper = asyncio.create_task(self._leases.run())

    async def close(self) -> None:
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def enter(self) -> "Permit":
        """Raises RateLimited with the code upstream_busy when a limit is reached."""
        home, wish = self._shared, self._wish(1)
        try:
            answer = await home.reserve(wish)
        except Unavailable:
            home, wish = self._local, self._wish(self._processes)
            answer = await home.reserve(wish)
        if isinstance(answer, Denial):
            raise self._busy(answer)
        if wish.slots:
            self._leases.add(home, self._group, wish.id)
        return Permit(self, home, wish)

    def leave(self, home: Counters, wish: Wish) -> None:
        if not wish.slots:
            return  # a request of this minute is not given back
        amounts = [take.amount for take in wish.takes]
        work = self._leases.end(home, self._group, wish.id, amounts, 0)
        task = asyncio.ensure_future(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _wish(self, shares: int) -> Wish:
        takes: tuple[Take, ...] = ()
        if self._per_minute:
            # The burst is one second's worth, at least one request.
            rate = max(1, self._per_minute // shares)
            capacity = max(1, rate // 60)
            takes = (Take("requests", capacity, -(-capacity * 60_000 // rate), 1, 1),)
        slots = (Slot("in_flight", max(1, self._most // shares)),) if self._most else ()
        return Wish(self._group, new_id("up"), LEASE_MS if slots else 0, takes, slots)

    def _busy(self, denial: Denial) -> TollhouseError:
        if "in_flight" in denial.keys:
            why = f"{self._most} requests are running there, the maximum of its entry"
            return busy(why, _FULL_WAIT_S)
        return busy(
            f"it has had its {self._per_minute} requests per minute",
            (denial.wait_ms or 1000) / 1000,
        )


class Permit:
    """Permission to send one request, released once."""

    def __init__(self, limits: UpstreamLimits, home: Counters, wish: Wish) -> None:
        self._limits: UpstreamLimits | None = limits
        self._home = home
        self._wish = wish

    def give_back(self) -> None:
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.leave(self._home, self._wish)


def busy(why: str, wait_s: float) -> TollhouseError:
    return RateLimited(
        f"The upstream is at its limit: {why}.", code="upstream_busy", retry_after_s=wait_s
    )
