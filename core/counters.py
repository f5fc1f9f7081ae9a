"""Atomic counters: token buckets, leased concurrency slots and money holds, reserved in one step.

A reservation takes from every bucket, slot and money cap that it names, or from none. All amounts
(tokens, milliseconds, nano-units of money) are integers below 2^53, so that Redis's doubles are
exact. The memory and the Redis implementation pass the same contract suite.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field

EXACT = 2**53 - 1  # the largest integer up to which doubles are exact
_MAX = EXACT // 2
DAY_MS = 86_400_000  # the longest period: its square is below 2^53
PICO_PER_NANO = 1000
# How long the money of a kept reservation whose lease expired waits for its settlement.
KEPT_MS = 7 * DAY_MS


class Take(Struct, frozen=True):
    """An amount to take from a token bucket that refills `capacity` units every `period_ms`.

    `keep` is the part that stays taken if the lease expires before the reservation settles. A shadow
    take is counted and reported but never causes a denial.
    """

    key: str
    capacity: int
    period_ms: int
    amount: int
    keep: int
    shadow: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.period_ms <= DAY_MS or not 0 < self.capacity <= _MAX:
            raise ValueError(f"bucket {self.key}: capacity or period out of range")
        if not 0 <= self.keep <= self.amount <= _MAX:
            raise ValueError(f"bucket {self.key}: 0 <= keep <= amount does not hold")


class Slot(Struct, frozen=True):
    """`count` of `limit` concurrency slots, held until the reservation settles or its lease expires."""

    key: str
    limit: int
    shadow: bool = False
    count: int = 1

    def members(self, id: str) -> list[str]:
        """What a reservation with this id enters into the set of the slot's holders."""
        return [id, *[f"{id} {number}" for number in range(2, self.count + 1)]]


class Cap(Struct, frozen=True):
    """A limit of `cap` nano-units of money on this key. `spent` initialises a new key, and raises
    the spent amount of a key that has a lower one."""

    key: str
    cap: int
    spent: int


class Hold(Struct, frozen=True):
    """Money to hold against every cap: up to `want` as the caps allow, and at least `need`. Unless it
    `seeds`, a cap whose account is not there yet, or was lost, denies it as unseeded."""

    need: int
    want: int
    caps: tuple[Cap, ...]
    seeds: bool = True


class BucketRequest(Struct, frozen=True):
    """The amounts of one reservation. All keys of a group are in one Redis Cluster slot.

    With a lease of 0 ms the amounts are consumed at once: buckets only, nothing to settle.
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
    wait_ms: int | None  # until the take fits; 0: it fits now, None: it never does


class BucketGrant(Struct, frozen=True):
    remaining: tuple[int, ...]  # by bucket, in the order of `takes`
    reset_ms: tuple[int, ...]  # until the bucket is full again
    held: int  # nano-units
    slots_used: tuple[int, ...] = ()
    shadow: tuple[str, ...] = ()  # shadow keys that were over their limit
    takes: tuple[Take, ...] = ()  # of the request that was granted

    @property
    def buckets(self) -> tuple[BucketState, ...]:
        states = []
        for take, left, reset in zip(self.takes, self.remaining, self.reset_ms, strict=True):
            wait = 0 if take.amount <= take.capacity else None
            states.append(BucketState(take.key, take.capacity, take.period_ms, left, reset, wait))
        return tuple(states)


class HeldMoney(Struct, frozen=True):
    """Money under one cap: what the cap counts as held, and the sum over its reservations, in
    nano-units. They are equal."""

    key: str
    held: int
    reserved: int


class Denial(Struct, frozen=True):
    """Nothing was taken. `wait_ms` is None if waiting may not help."""

    buckets: tuple[BucketState, ...]
    slots_used: tuple[int, ...]
    keys: tuple[str, ...]  # buckets and slots over their limit
    money: tuple[str, ...] = field(default=())  # caps below `need`
    shadow: tuple[str, ...] = ()
    affordable: int = 0  # nano-units that the caps still allow
    unseeded: bool = False  # what was spent under a cap is unknown: `seed` it, and try again

    @property
    def wait_ms(self) -> int | None:
        if self.money:
            return None
        waits = [state.wait_ms for state in self.buckets if state.key in self.keys]
        known = [wait for wait in waits if wait is not None]
        return max(known) if waits and len(known) == len(waits) else None


class Counters(Protocol):
    async def start(self) -> None:
        """Await before the first call."""
        ...

    async def reserve(self, bucket_request: BucketRequest) -> BucketGrant | Denial:
        """All or nothing. A repeated id returns the same grant and takes nothing more."""
        ...

    async def extend(
        self, group: str, id: str, amounts: Sequence[int], need: int, want: int
    ) -> int:
        """Raise the takes to `amounts` (a bucket may go into debt) and hold more money.

        Returns the additional nano-units held: between `need` and `want`, or 0 if the caps allow less.
        -1: the id or what was spent is unknown, because the data was lost; `restore` and `seed`.
        """
        ...

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        """End the reservation at the exact amounts, in the order of its takes, and record `spent`
        nano-units. Returns False if the id is unknown.

        Empty `amounts` leave the takes unchanged: the holder died and only the cost is known.
        """
        ...

    async def keep(self, group: str, id: str) -> None:
        """The reservation has a durable record elsewhere, from which it will be settled: when its
        lease expires its money stays held, for `KEPT_MS`. Other reservations return it at once."""
        ...

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        """Extend the leases to `lease_ms` from now. An expired lease is not revived."""
        ...

    async def restore(self, bucket_request: BucketRequest, held: int) -> bool:
        """Enter a running reservation whose data was lost, with the nano-units that it holds. Its
        takes are not taken again. Returns False if the id is known."""
        ...

    async def seed(self, group: str, caps: Sequence[Cap]) -> None:
        """Enter what was spent under caps with unseeded accounts, on top of what was settled since."""
        ...

    async def born(self) -> tuple[int, int]:
        """When the data began, and now, in ms. It begins again when the server loses its data."""
        ...

    async def holds(self, group: str, keys: Sequence[str]) -> tuple[HeldMoney, ...]:
        """The money held under these caps, for the audit."""
        ...

    async def close(self) -> None: ...


def refused_state(take: Take, used: int, carry: int) -> BucketState:
    """The public state of a bucket from which nothing was taken."""
    remaining = max(0, take.capacity - used)
    short = used + take.amount - take.capacity
    wait = ms_until(short, carry, take) if take.amount <= take.capacity else None
    reset = ms_until(used, carry, take)
    return BucketState(take.key, take.capacity, take.period_ms, remaining, reset, wait)


_MOST = EXACT // 4


def nano_ceil(picounits: int) -> int:
    """Amounts are rounded up and caps down (`nano_floor`), so the sum never exceeds the true cap."""
    nanos = -(-picounits // PICO_PER_NANO)
    return nanos if nanos < _MOST else _MOST


def nano_floor(picounits: int) -> int:
    return min(_MOST, picounits // PICO_PER_NANO)


def ms_until(units: int, carry: int, take: Take) -> int:
    """Until a bucket from which `units` and `carry` are taken has refilled them."""
    return -(-(units * take.period_ms - carry) // take.capacity) if units > 0 else 0
