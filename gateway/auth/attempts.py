"""A limit per address on failed sign-ins and wrong keys, which makes guessing slow."""

import ipaddress
from collections import OrderedDict

from core.clock import Clock
from core.counters import Counters, Denial, Grant, Take, Wish
from core.counters_memory import MemoryCounters
from core.errors import RateLimited, Unavailable
from core.ids import new_id

PER_MINUTE = 30
_KEPT = 50_000


class FailedAttempts:
    def __init__(self, counters: Counters, clock: Clock, per_minute: int = PER_MINUTE) -> None:
        self._shared = counters
        self._own = MemoryCounters(clock)
        self._clock = clock
        self._per_minute = per_minute
        self._blocked: OrderedDict[str, float] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises RateLimited while the address is blocked. Call it before checking a credential."""
        place = _network_of(address)
        until = self._blocked.get(place)
        if until is None:
            return
        left = until - self._clock.monotonic()
        if left > 0:
            raise _refusal(left)
        del self._blocked[place]

    async def failed(self, address: str) -> None:
        """Count one failure. The failure that exceeds the limit blocks the address until it refills."""
        place = _network_of(address)
        wish = self._wish(place)
        try:
            answer = await self._shared.reserve(wish)
        except Unavailable:
            answer = await self._own.reserve(wish)
        self._judge(place, answer)

    def failed_here(self, address: str) -> None:
        """As `failed`, for callers without an event loop; only this process counts the failure."""
        place = _network_of(address)
        self._judge(place, self._own.reserve_now(self._wish(place)))

    def _judge(self, place: str, answer: Grant | Denial) -> None:
        if isinstance(answer, Denial):
            self._block(place, (answer.wait_ms or 1000) / 1000)
            self.check(place)

    def _wish(self, place: str) -> Wish:
        take = Take("failed", self._per_minute, 60_000, 1, 1)
        return Wish(f"address:{place}", new_id("try"), 0, (take,))

    def _block(self, place: str, seconds: float) -> None:
        self._blocked[place] = self._clock.monotonic() + seconds
        if len(self._blocked) > _KEPT:
            self._blocked.popitem(last=False)


def _network_of(address: str) -> str:
    """The unit that is limited: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        seen = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(seen, ipaddress.IPv6Address) and seen.ipv4_mapped is None:
        return str(ipaddress.ip_network((seen, 64), strict=False))
    return str(getattr(seen, "ipv4_mapped", None) or seen)


def _refusal(seconds: float) -> RateLimited:
    return RateLimited(
        "Too many failed attempts from this address.",
        next_step="Wait for the time in retry-after, then use the right credentials.",
        code="too_many_failed_attempts",
        retry_after_s=seconds,
    )
