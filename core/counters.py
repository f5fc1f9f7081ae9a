"""Counters that cannot be raced: token buckets, leased slots and money holds, taken in one step.

A reservation takes from every bucket, slot and money cap that it names, or from none. All figures
are whole numbers below 2^53, so that Redis' doubles are exact: tokens, milliseconds, nano-units of
money. One contract suite runs on the memory and on the Redis implementation.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field

EXACT = 2**53 - 1  # the largest whole number that a double tells from its neighbours
_MOST = EXACT // 2
DAY_MS = 86_400_000  # the longest period: its square is still exact
PICO_PER_NANO = 1000


class Take(Struct, frozen=True):
    """From a token bucket that refills continuously, `capacity` units every `period_ms`.

    `keep` is what stays taken if the holder dies and its lease runs out. A shadow take counts and
    reports, and refuses nothing.
    """

    key: str
    capacity: int
    period_ms: int
    amount: int
    keep: int
    shadow: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.period_ms <= DAY_MS or not 0 < self.capacity <= _MOST:
            raise ValueError(f"bucket {self.key}: capacity or period out of range")
        if not 0 <= self.keep <= self.amount <= _MOST:
            raise ValueError(f"bucket {self.key}: 0 <= keep <= amount does not hold")


class Slot(Struct, frozen=True):
    """One of `limit` places, held until the reservation settles or its lease runs out."""

    key: str
    limit: int
    shadow: bool = False


class Cap(Struct, frozen=True):
    """At most `cap` nano-units of money in this key. `spent` seeds a key that is not there yet,
    and raises one that knows of less."""

    key: str
    cap: int
    spent: int


class Hold(Struct, frozen=True):
    """Money held against every cap: as much of `want` as they all allow, and no less than `need`."""

    need: int
    want: int
    caps: tuple[Cap, ...]


class Wish(Struct, frozen=True):
    """What one reservation asks for. Keys of one group lie together (one Redis Cluster slot).

    A lease of 0 ms is spent at once: buckets only, nothing to settle.
    """

    group: str
    id: str
    lease_ms: int
    takes: tuple[Take, ...] = ()
    slots: tuple[Slot, ...] = ()
    hold: Hold | None = None

    def __post_init__(self) -> None:
        if self.lease_ms <= 0 and (self.lease_ms < 0 or self.slots or self.hold):
            raise ValueError(f"reservation {self.id}: slots and money need a lease")


class BucketState(Struct, frozen=True):
    key: str
    capacity: int
    period_ms: int
    remaining: int
    reset_ms: int  # until the bucket is full again
    wait_ms: int | None  # until the take would fit; 0 it fits now, None it never does


class Grant(Struct, frozen=True):
    buckets: tuple[BucketState, ...]
    slots_used: tuple[int, ...]
    held: int  # nano-units
    shadow: tuple[str, ...] = ()  # keys that would have refused


class Denial(Struct, frozen=True):
    """Nothing was taken. `wait_ms` is None where waiting is not known to help."""

    buckets: tuple[BucketState, ...]
    slots_used: tuple[int, ...]
    keys: tuple[str, ...]  # what refused: buckets and slots
    money: tuple[str, ...] = field(default=())  # caps that refused
    shadow: tuple[str, ...] = ()
    affordable: int = 0  # nano-units that all caps together would still allow

    @property
    def wait_ms(self) -> int | None:
        if self.money:
            return None
        waits = [state.wait_ms for state in self.buckets if state.key in self.keys]
        known = [wait for wait in waits if wait is not None]
        return max(known) if waits and len(known) == len(waits) else None


class Counters(Protocol):
    async def start(self) -> None:
        """Before the first call."""
        ...

    async def reserve(self, wish: Wish) -> Grant | Denial:
        """All or nothing. The same id again gives the same grant and takes nothing more."""
        ...

    async def extend(
        self, group: str, id: str, amounts: Sequence[int], need: int, want: int
    ) -> int:
        """Raise the takes to `amounts` (they may go into debt) and hold more money.

        Returns the nano-units newly held: between need and want, or 0 where the caps allow less.
        """
        ...

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        """End the reservation at the exact amounts, in the order of its takes. False: not known.

        Without amounts the takes stay as they are: the holder died, and only the cost is known.
        """
        ...

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        """Push the leases' end away from now. One that ran out already stays lost."""
        ...

    async def close(self) -> None: ...


def state_of(take: Take, used: int, carry: int, *, taken: bool) -> BucketState:
    """What a client is told of a bucket; `used` is after the take where it was `taken`."""
    remaining = max(0, take.capacity - used)
    short = 0 if taken else used + take.amount - take.capacity
    wait = _ms_until(short, carry, take) if take.amount <= take.capacity else None
    reset = _ms_until(used, carry, take)
    return BucketState(take.key, take.capacity, take.period_ms, remaining, reset, wait)


def nano_ceil(picounits: int) -> int:
    """Money into the counters is rounded up, a cap down: the sum never passes the true cap."""
    return min(EXACT // 4, -(-picounits // PICO_PER_NANO))


def nano_floor(picounits: int) -> int:
    return min(EXACT // 4, picounits // PICO_PER_NANO)


def _ms_until(units: int, carry: int, take: Take) -> int:
    return -(-(units * take.period_ms - carry) // take.capacity) if units > 0 else 0
