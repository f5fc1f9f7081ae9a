"""The counters of one process: dictionaries behind one lock. Made for one worker, tests and demos."""

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.counters import Denial, Grant, Take, Wish, gain, state_of


@dataclass(slots=True)
class _Bucket:
    used: int
    carry: int
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
    live: bool = True  # the lease runs; a lost record keeps its money until it settles


class MemoryCounters:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], _Bucket] = {}
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
        """For callers without an event loop."""
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
            for index, amount in enumerate(amounts):
                more = max(0, amount - record.amounts[index])
                self._add(group, record.wish.takes[index], more, now)
                record.amounts[index] += more
            return self._hold_more(record, need, want)

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        with self._lock:
            now = self._now()
            self._expire(now)
            record = self._records.pop((group, id), None)
            if record is None:
                return False
            for take, amount, held in zip(record.wish.takes, amounts, record.amounts, strict=False):
                self._add(group, take, amount - held, now)
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
        group = wish.group
        self._sweep(now)
        buckets = [self._bucket(group, take, now) for take in wish.takes]
        places = [self._slots.setdefault((group, slot.key), set()) for slot in wish.slots]
        full = [
            (take.key, take.shadow)
            for take, bucket in zip(wish.takes, buckets, strict=True)
            if bucket.used + take.amount > take.capacity
        ]
        full += [
            (slot.key, slot.shadow)
            for slot, held in zip(wish.slots, places, strict=True)
            if len(held) >= slot.limit
        ]
        shadow = tuple(key for key, is_shadow in full if is_shadow)
        refused = tuple(key for key, is_shadow in full if not is_shadow)
        free = self._affordable(wish)
        broke = wish.hold is not None and min(free.values(), default=0) < wish.hold.need
        if refused or (broke and free):
            need = wish.hold.need if wish.hold else 0
            return Denial(
                tuple(
                    state_of(take, bucket.used, bucket.carry, taken=False)
                    for take, bucket in zip(wish.takes, buckets, strict=True)
                ),
                tuple(len(held) for held in places),
                refused,
                tuple(key for key, left in free.items() if left < need),
                shadow,
                max(0, min(free.values(), default=0)),
            )
        for take, bucket in zip(wish.takes, buckets, strict=True):
            bucket.used += take.amount
        for held in places:
            held.add(wish.id)
        granted = min(wish.hold.want, *free.values()) if wish.hold and free else 0
        for key in free:
            self._money[(group, key)].held += granted
        grant = Grant(
            tuple(
                state_of(take, bucket.used, bucket.carry, taken=True)
                for take, bucket in zip(wish.takes, buckets, strict=True)
            ),
            tuple(len(held) for held in places),
            granted,
            shadow,
        )
        if wish.lease_ms == 0:
            return grant
        expires = now + wish.lease_ms
        amounts = [take.amount for take in wish.takes]
        self._records[(group, wish.id)] = _Record(wish, amounts, granted, expires, grant)
        heapq.heappush(self._leases, (expires, group, wish.id))
        return grant

    def _affordable(self, wish: Wish) -> dict[str, int]:
        """Nano-units left in each cap, after seeding."""
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

    def _bucket(self, group: str, take: Take, now: int) -> _Bucket:
        bucket = self._buckets.get((group, take.key))
        if bucket is None:
            bucket = self._buckets[(group, take.key)] = _Bucket(0, 0, now)
        elapsed = now - bucket.at
        if elapsed > 0:
            whole, rest = divmod(elapsed, take.period_ms)
            units, bucket.carry = gain(rest, bucket.carry, take.capacity, take.period_ms)
            bucket.used -= whole * take.capacity + units
            bucket.at = now
        if bucket.used <= 0:
            bucket.used = bucket.carry = 0
        return bucket

    def _add(self, group: str, take: Take, difference: int, now: int) -> None:
        if difference == 0:
            return
        bucket = self._bucket(group, take, now)
        bucket.used += difference
        if bucket.used <= 0:
            bucket.used = bucket.carry = 0

    def _expire(self, now: int) -> None:
        """Leases that ran out give back their slots and what is above `keep`; money stays held."""
        while self._leases and self._leases[0][0] <= now:
            _, group, id = heapq.heappop(self._leases)
            record = self._records.get((group, id))
            if record is None or not record.live or record.expires > now:
                continue
            record.live = False
            self._leave(record)
            for index, take in enumerate(record.wish.takes):
                self._add(group, take, min(0, take.keep - record.amounts[index]), now)
                record.amounts[index] = min(take.keep, record.amounts[index])
            if record.held == 0:
                del self._records[(group, id)]

    def _leave(self, record: _Record) -> None:
        for slot in record.wish.slots:
            self._slots[(record.wish.group, slot.key)].discard(record.wish.id)

    def _sweep(self, now: int) -> None:
        """Forget, now and then, buckets that nobody has touched for longer than any period."""
        self._writes += 1
        if self._writes % 5_000:
            return
        idle = [key for key, bucket in self._buckets.items() if now - bucket.at > 2 * 86_400_000]
        for key in idle:
            del self._buckets[key]

    def _now(self) -> int:
        return round(self._clock.monotonic() * 1000)
