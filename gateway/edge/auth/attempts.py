"""A limit per address on failed sign-ins and wrong keys, which makes guessing slow."""

import ipaddress
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from core.clock import Clock
from core.counters import BucketGrant, BucketRequest, Counters, Denial, Take
from core.counters_memory import MemoryCounters
from core.errors import RateLimited, Unavailable
from core.ids import new_id

PER_MINUTE = 30
_MAX_ENTRIES = 50_000
_ATTEMPT_MS = 60_000  # in which an attempt ends


@dataclass(frozen=True, slots=True)
class Taken:
    counters: Counters
    group: str
    id: str


class FailedAttempts:
    def __init__(
        self, counters: Counters, clock: Clock, per_minute: int = PER_MINUTE, what: str = "failed"
    ) -> None:
        """`what` names the bucket that counts, for limits on other things than failures."""
        self._what = what
        self._shared = counters
        self._local = MemoryCounters(clock)
        self._clock = clock
        self._per_minute = per_minute
        self._blocked: OrderedDict[str, float] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises RateLimited while the address is blocked. Call it before checking a password; a key
        cannot be guessed, so a valid one is served all the same."""
        network = _network_of(address)
        until = self._blocked.get(network)
        if until is None:
            return
        remaining_s = until - self._clock.monotonic()
        if remaining_s > 0:
            raise _too_many_attempts(remaining_s)
        del self._blocked[network]

    def is_blocked(self, address: str) -> bool:
        until = self._blocked.get(_network_of(address))
        return until is not None and until > self._clock.monotonic()

    async def failed(self, address: str) -> None:
        """Count one failure. The failure that exceeds the limit blocks the address until it refills."""
        network = _network_of(address)
        bucket_request = self._bucket_request(network)
        try:
            answer = await self._shared.reserve(bucket_request)
        except Unavailable:
            answer = await self._local.reserve(bucket_request)
        self._block_if_denied(network, answer)

    async def take(self, address: str) -> "Taken":
        """Count an attempt before it is made, in all processes; RateLimited if there were too many.
        Call `give_back` if it succeeds."""
        self.check(address)
        network = _network_of(address)
        bucket_request = self._bucket_request(network, _ATTEMPT_MS)
        counters = self._shared
        try:
            answer = await counters.reserve(bucket_request)
        except Unavailable:
            counters = self._local
            answer = await counters.reserve(bucket_request)
        self._block_if_denied(network, answer)
        return Taken(counters, bucket_request.group, bucket_request.id)

    async def give_back(self, taken: "Taken") -> None:
        with suppress(Unavailable):
            await taken.counters.settle(taken.group, taken.id, (0,), 0)

    def _block_if_denied(self, network: str, answer: BucketGrant | Denial) -> None:
        if isinstance(answer, Denial):
            self._block(network, (answer.wait_ms or 1000) / 1000)
            self.check(network)

    def _bucket_request(self, network: str, lease_ms: int = 0) -> BucketRequest:
        take = Take(self._what, self._per_minute, 60_000, 1, 1)
        return BucketRequest(f"address:{network}", new_id("try"), lease_ms, (take,))

    def _block(self, network: str, seconds: float) -> None:
        self._blocked[network] = self._clock.monotonic() + seconds
        if len(self._blocked) > _MAX_ENTRIES:
            self._blocked.popitem(last=False)


def _network_of(address: str) -> str:
    """The unit that is limited: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def _too_many_attempts(seconds: float) -> RateLimited:
    return RateLimited(
        "Too many failed attempts from this address.",
        next_step="Wait for the time in retry-after, then use the right credentials.",
        code="too_many_failed_attempts",
        retry_after_s=seconds,
    )
