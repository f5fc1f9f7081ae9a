"""The limits in an upstream's entry, counted over all gateway processes that share counters."""

import asyncio

from core.clock import Clock
from core.counters import BucketRequest, Counters, Denial, Slot, Take
from core.counters_memory import MemoryCounters
from core.errors import RateLimited, TollhouseError, Unavailable
from core.ids import new_id
from gateway.admission.leases import Leases
from gateway.admission.reservation import LEASE_MS
from gateway.catalog.upstreams import Upstream

_FULL_WAIT_S = 1.0  # retry-after when full: it is unknown when a running request ends


class UpstreamLimits:
    """The limits of one upstream. While the shared counters are down, each process applies its share."""

    def __init__(
        self, upstream: Upstream, counters: Counters, clock: Clock, *, processes: int = 1
    ) -> None:
        self._group = f"upstream:{upstream.replica_name}"
        self._max_in_flight = upstream.max_in_flight
        self._per_minute = upstream.requests_per_minute
        self._shared = counters
        self._local = MemoryCounters(clock)
        self._processes = max(1, processes)
        self._leases = Leases(counters)
        self._renewal: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._max_in_flight or self._per_minute)

    @property
    def counters(self) -> Counters:
        """Those that all gateway processes share."""
        return self._shared

    def start(self) -> None:
        if self._max_in_flight:
            self._renewal = asyncio.create_task(self._leases.run())

    async def close(self) -> None:
        await asyncio.gather(*self._releases, return_exceptions=True)
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    async def acquire(self) -> "Permit":
        """Raises RateLimited with the code upstream_busy when a limit is reached."""
        counters, bucket_request = self._shared, self._bucket_request(1)
        try:
            answer = await counters.reserve(bucket_request)
        except Unavailable:
            counters, bucket_request = self._local, self._bucket_request(self._processes)
            answer = await counters.reserve(bucket_request)
        if isinstance(answer, Denial):
            raise self._upstream_busy(answer)
        permit = Permit(self, counters, bucket_request)
        if bucket_request.slots:
            self._leases.add(permit)
        return permit

    def release(self, counters: Counters, bucket_request: BucketRequest) -> None:
        if not bucket_request.slots:
            return  # a request of this minute is not given back
        amounts = [take.amount for take in bucket_request.takes]
        work = self._leases.end(counters, self._group, bucket_request.id, amounts, 0)
        task = asyncio.ensure_future(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _bucket_request(self, shares: int) -> BucketRequest:
        takes: tuple[Take, ...] = ()
        if self._per_minute:
            # The burst is one second's worth, at least one request.
            rate = max(1, self._per_minute // shares)
            capacity = max(1, rate // 60)
            takes = (Take("requests", capacity, -(-capacity * 60_000 // rate), 1, 1),)
        slots = (
            (Slot("in_flight", max(1, self._max_in_flight // shares)),)
            if self._max_in_flight
            else ()
        )
        return BucketRequest(self._group, new_id("up"), LEASE_MS if slots else 0, takes, slots)

    def _upstream_busy(self, denial: Denial) -> TollhouseError:
        if "in_flight" in denial.keys:
            why = f"{self._max_in_flight} requests are running there, the maximum in its entry"
            return upstream_busy(why, _FULL_WAIT_S)
        return upstream_busy(
            f"it has received its maximum of {self._per_minute} requests in the last minute",
            (denial.wait_ms or 1000) / 1000,
        )


class Permit:
    """Permission to send one request, released once."""

    held_units = 0  # it holds no money
    kept = False

    def __init__(
        self, limits: UpstreamLimits, counters: Counters, bucket_request: BucketRequest
    ) -> None:
        self._limits: UpstreamLimits | None = limits
        self.counters = counters
        self.bucket_request = bucket_request

    def release(self) -> None:
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.release(self.counters, self.bucket_request)


def upstream_busy(why: str, wait_s: float) -> TollhouseError:
    return RateLimited(
        f"The upstream is at its limit: {why}.", code="upstream_busy", retry_after_s=wait_s
    )
