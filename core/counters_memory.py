"""In-memory counters of one process, behind one lock: for a single worker, tests and demos."""

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.counters import DAY_MS, BucketState, Denial, Grant, Take, Wish

_IDLE_MS = 2 * DAY_MS


@dataclass(slots=True)
class _Bucket:
    """`debt` is the amount taken and not yet refilled, in units times the period's milliseconds:
    each millisecond refills exactly `capacity` of it, without rounding."""

    debt: int
    at: int  # ms


@dataclass(slots=True)
class _Money:
    spent: int
    held: int


@dataclass(slots=True)
class _Record:
    wish: Wish
    amounts: list[int]
    held: int
    expires: int
    grant: Grant
    live: bool = True  # False once the lease expired; money stays held until it settles


class MemoryCounters:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, _Bucket]] = {}  # by group and key
        self._slots: dict[tuple[str, str], set[str]] = {}
        self._money: dict[tuple[str, str], _Money] = {}
        self._records: dict[tuple[str, str], _Record] = {}
        self._leases: list[tuple[int, str, str]] = []
        self._writes = 0

    async def start(self) -> None:
        return

    async def reserve(self, wish: Wish) -> Grant | Denial:
        return self.reserve_now(wish)

    def reserve_now(self, wish: Wish) -> Grant | Denial:
        """`reserve` for callers without an event loop."""
        with self._lock:
            now = self._now()
            self._expire(now)
            known = self._records.get((wish.group, wish.id))
            if known is not None:
                return known.grant
            return self._try(wish, now)

    async def extend(
        self, group: str, id: str, amounts: Sequence[int], need: int, want: int
    ) -> int:
        with self._lock:
            now = self._now()
            self._expire(now)
            record = self._records.get((group, id))
            if record is None:
                return 0
            raised = [max(*pair) for pair in zip(record.amounts, amounts, strict=False)]
            self._amend(group, record, raised, now)
            return self._hold_more(record, need, want)

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        with self._lock:
            now = self._now()
            self._expire(now)
            record = self._records.pop((group, id), None)
            if record is None:
                return False
            self._amend(group, record, amounts, now)
            self._leave(record)
            for cap in record.wish.hold.caps if record.wish.hold else ():
                money = self._money[(group, cap.key)]
                money.held -= record.held
                money.spent += spent
            return True

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        with self._lock:
            now = self._now()
            self._expire(now)
            for id in ids:
                record = self._records.get((group, id))
                if record is not None and record.live:
                    record.expires = now + lease_ms
                    heapq.heappush(self._leases, (record.expires, group, id))

    async def close(self) -> None:
        return None

    def _try(self, wish: Wish, now: int) -> Grant | Denial:
        group, takes = wish.group, wish.takes
        self._sweep(now)
        buckets = self._refilled(group, takes, now)
        places = [self._slots.setdefault((group, slot.key), set()) for slot in wish.slots]
        full = [
            (take.key, take.shadow)
            for take, bucket in zip(takes, buckets, strict=True)
            if bucket.debt > (take.capacity - take.amount) * take.period_ms
        ]
        full += [
            (slot.key, slot.shadow)
            for slot, held in zip(wish.slots, places, strict=True)
            if len(held) >= slot.limit
        ]
        shadow = tuple([key for key, is_shadow in full if is_shadow])
        refused = tuple([key for key, is_shadow in full if not is_shadow])
        free = self._affordable(wish)
        broke = wish.hold is not None and min(free.values(), default=0) < wish.hold.need
        if refused or (broke and free):
            need = wish.hold.need if wish.hold else 0
            return Denial(
                _states(takes, buckets, taken=False),
                tuple([len(held) for held in places]),
                refused,
                tuple([key for key, left in free.items() if left < need]),
                shadow,
                max(0, min(free.values(), default=0)),
            )
        for take, bucket in zip(takes, buckets, strict=True):
            bucket.debt += take.amount * take.period_ms
        for held in places:
            held.add(wish.id)
        granted = min(wish.hold.want, *free.values()) if wish.hold and free else 0
        for key in free:
            self._money[(group, key)].held += granted
        states = _states(takes, buckets, taken=True)
        grant = Grant(states, tuple([len(held) for held in places]), granted, shadow)
        if wish.lease_ms == 0:
            return grant
        expires = now + wish.lease_ms
        amounts = [take.amount for take in takes]
        self._records[(group, wish.id)] = _Record(wish, amounts, granted, expires, grant)
        heapq.heappush(self._leases, (expires, group, wish.id))
        return grant

    def _affordable(self, wish: Wish) -> dict[str, int]:
        """Nano-units left in each cap, after `spent` is applied."""
        if wish.hold is None:
            return {}
        left = {}
        for cap in wish.hold.caps:
            money = self._money.setdefault((wish.group, cap.key), _Money(cap.spent, 0))
            money.spent = max(money.spent, cap.spent)
            left[cap.key] = cap.cap - money.spent - money.held
        return left

    def _hold_more(self, record: _Record, need: int, want: int) -> int:
        hold = record.wish.hold
        if hold is None or not hold.caps or want <= 0:
            return 0
        moneys = [(cap.cap, self._money[(record.wish.group, cap.key)]) for cap in hold.caps]
        granted = min(want, *(cap - money.spent - money.held for cap, money in moneys))
        if granted < max(need, 1):
            return 0
        for _, money in moneys:
            money.held += granted
        record.held += granted
        return granted

    def _refilled(self, group: str, takes: Sequence[Take], now: int) -> list[_Bucket]:
        """The takes' buckets, refilled up to `now`."""
        known = self._buckets.setdefault(group, {})
        found = []
        for take in takes:
            bucket = known.get(take.key)
            if bucket is None:
                bucket = known[take.key] = _Bucket(0, now)
            elif (elapsed := now - bucket.at) > 0:
                left = bucket.debt - elapsed * take.capacity
                bucket.debt, bucket.at = left if left > 0 else 0, now
            found.append(bucket)
        return found

    def _amend(self, group: str, record: _Record, amounts: Sequence[int], now: int) -> None:
        """Set the takes to `amounts`; takes beyond its length are unchanged."""
        changed = [
            (take, amount - held)
            for take, amount, held in zip(record.wish.takes, amounts, record.amounts, strict=False)
            if amount != held
        ]
        record.amounts[: len(amounts)] = amounts
        buckets = self._refilled(group, [take for take, _ in changed], now)
        for (take, difference), bucket in zip(changed, buckets, strict=True):
            debt = bucket.debt + difference * take.period_ms
            bucket.debt = debt if debt > 0 else 0

    def _expire(self, now: int) -> None:
        """Expired leases return their slots and the amounts above `keep`; money stays held."""
        while self._leases and self._leases[0][0] <= now:
            _, group, id = heapq.heappop(self._leases)
            record = self._records.get((group, id))
            if record is None or not record.live or record.expires > now:
                continue
            record.live = False
            self._leave(record)
            takes = record.wish.takes
            kept = [min(take.keep, held) for take, held in zip(takes, record.amounts, strict=True)]
            self._amend(group, record, kept, now)
            if record.held == 0:
                del self._records[(group, id)]

    def _leave(self, record: _Record) -> None:
        for slot in record.wish.slots:
            self._slots[(record.wish.group, slot.key)].discard(record.wish.id)

    def _sweep(self, now: int) -> None:
        """Every 5,000 calls, drop buckets unused for longer than the longest period."""
        self._writes += 1
        if self._writes % 5_000:
            return
        for group, buckets in list(self._buckets.items()):
            left = {key: each for key, each in buckets.items() if now - each.at <= _IDLE_MS}
            if left:
                self._buckets[group] = left
            else:
                del self._buckets[group]

    def _now(self) -> int:
        return round(self._clock.monotonic() * 1000)


def _states(
    takes: Sequence[Take], buckets: Sequence[_Bucket], *, taken: bool
) -> tuple[BucketState, ...]:
    """The public states of the buckets. The debts include the takes if `taken`."""
    states = []
    for take, bucket in zip(takes, buckets, strict=True):
        capacity, period, debt = take.capacity, take.period_ms, bucket.debt
        remaining, reset = capacity + -debt // period, -(-debt // capacity)
        wait: int | None = 0
        if take.amount > capacity:
            wait = None
        elif not taken:
            wait = max(0, -(-(debt - (capacity - take.amount) * period) // capacity))
        if remaining < 0:
            remaining = 0
        states.append(BucketState(take.key, capacity, period, remaining, reset, wait))
    return tuple(states)
