"""In-memory counters of one process, behind one lock: for a single worker, tests and demos."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from msgspec import Struct

from core.clock import Clock
from core.counters import (
    DAY_MS,
    KEPT_MS,
    BucketGrant,
    BucketRequest,
    BucketState,
    Cap,
    Denial,
    HeldMoney,
    Hold,
    Slot,
    Take,
)
from core.expiries import Expiries

_IDLE_MS = 2 * DAY_MS
_SWEEP_EVERY = 5_000  # reservations
_MAX_TUPLES = 4_096  # of takes whose buckets are known


@dataclass(slots=True)
class _Bucket:
    """`debt` is the amount taken and not yet refilled, in units times the period's milliseconds:
    each millisecond refills exactly `capacity` of it, without rounding."""

    debt: int
    at: int  # ms


@dataclass(slots=True)
class _MoneyAccount:
    spent: int
    held: int
    seeded: bool = True


_Row = tuple[_Bucket, int, int, int, int, Take]


class _Taken(Struct, frozen=True):
    """Takes with their buckets, and what a reservation reckons with of each."""

    group: str
    takes: Sequence[Take]
    amounts: tuple[int, ...]
    # Bucket, capacity, period in ms, amount in the bucket's unit, the most debt beside it, take. Of
    # two takes from one bucket each is measured against what was taken before both.
    rows: tuple[_Row, ...]


class _Record(Struct):
    bucket_request: BucketRequest
    amounts: Sequence[int]
    held: int
    expires: int
    grant: BucketGrant
    taken: _Taken | None = None  # None: to be looked up
    kept: bool = False  # its money outlives the lease
    live: bool = True  # False once the lease expired


class MemoryCounters:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, _Bucket]] = {}  # by group and key
        # By the id of a tuple of takes, which requests of one size share.
        self._of_takes: dict[int, _Taken] = {}
        self._slots: dict[tuple[str, str], set[str]] = {}
        self._accounts: dict[tuple[str, str], _MoneyAccount] = {}
        self._records: dict[tuple[str, str], _Record] = {}
        self._leases = Expiries()
        self._writes = 0
        self._born = self._now()

    async def start(self) -> None:
        return

    async def reserve(self, bucket_request: BucketRequest) -> BucketGrant | Denial:
        return self.reserve_now(bucket_request)

    def reserve_now(self, bucket_request: BucketRequest) -> BucketGrant | Denial:
        """`reserve` for callers without an event loop."""
        with self._lock:
            now = self._now()
            if self._leases.soonest <= now:
                self._expire(now)
            known = self._records.get((bucket_request.group, bucket_request.id))
            if known is not None:
                return known.grant
            return self._reserve(bucket_request, now)

    async def extend(
        self, group: str, id: str, amounts: Sequence[int], need: int, want: int
    ) -> int:
        with self._lock:
            now = self._now()
            self._expire(now)
            record = self._records.get((group, id))
            if record is None:
                return -1
            raised = [max(*pair) for pair in zip(record.amounts, amounts, strict=False)]
            self._set_amounts(group, record, raised, now)
            return self._hold_more(record, need, want)

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        with self._lock:
            now = self._now()
            if self._leases.soonest <= now:
                self._expire(now)
            record = self._records.pop((group, id), None)
            if record is None:
                return False
            self._leases.remove((group, id), record.expires)
            if amounts:
                self._set_amounts(group, record, amounts, now)
            self._release_slots(record)
            self._return_money(record, spent)
            return True

    async def keep(self, group: str, id: str) -> None:
        self.keep_now(group, id)

    def keep_now(self, group: str, id: str) -> None:
        with self._lock:
            now = self._now()
            if self._leases.soonest <= now:
                self._expire(now)
            record = self._records.get((group, id))
            if record is not None:
                record.kept = True

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        with self._lock:
            now = self._now()
            self._expire(now)
            for id in ids:
                record = self._records.get((group, id))
                if record is not None and record.live:
                    self._leases.remove((group, id), record.expires)
                    record.expires = now + lease_ms
                    self._leases.add((group, id), record.expires)

    async def restore(self, bucket_request: BucketRequest, held: int) -> bool:
        with self._lock:
            group, id = bucket_request.group, bucket_request.id
            if (group, id) in self._records:
                return False
            now = self._now()
            amounts = [0] * len(bucket_request.takes)
            expires = now + bucket_request.lease_ms
            self._records[(group, id)] = _Record(
                bucket_request, amounts, held, expires, BucketGrant((), (), held)
            )
            self._leases.add((group, id), expires)
            for slot in bucket_request.slots:
                self._slots.setdefault((group, slot.key), set()).add(id)
            for cap in bucket_request.hold.caps if bucket_request.hold else ():
                account = self._accounts.setdefault(
                    (group, cap.key), _MoneyAccount(0, 0, seeded=False)
                )
                account.held += held
            return True

    async def seed(self, group: str, caps: Sequence[Cap]) -> None:
        with self._lock:
            for cap in caps:
                account = self._accounts.setdefault(
                    (group, cap.key), _MoneyAccount(0, 0, seeded=False)
                )
                if not account.seeded:
                    account.spent, account.seeded = account.spent + cap.spent, True

    async def born(self) -> tuple[int, int]:
        return self._born, self._now()

    async def holds(self, group: str, keys: Sequence[str]) -> tuple[HeldMoney, ...]:
        with self._lock:
            self._expire(self._now())
            reserved = dict.fromkeys(keys, 0)
            for (owner, _), record in self._records.items():
                hold = record.bucket_request.hold if owner == group else None
                for cap in hold.caps if hold is not None else ():
                    reserved[cap.key] = reserved.get(cap.key, 0) + record.held
            accounts = [self._accounts.get((group, key)) for key in keys]
            held = [account.held if account is not None else 0 for account in accounts]
            pairs = zip(keys, held, strict=True)
            return tuple([HeldMoney(key, each, reserved[key]) for key, each in pairs])

    async def close(self) -> None:
        return None

    def _reserve(self, bucket_request: BucketRequest, now: int) -> BucketGrant | Denial:
        group, takes, hold = bucket_request.group, bucket_request.takes, bucket_request.hold
        self._writes += 1
        if self._writes % _SWEEP_EVERY == 0:
            self._sweep(now)
        taken = self._taken_of(group, takes, now)
        full: list[Take | Slot] = []
        remaining: list[int] = []
        reset_ms: list[int] = []
        # Taken at once, and given back if anything refuses the request.
        for bucket, capacity, period_ms, amount, most, take in taken.rows:
            debt = bucket.debt
            if bucket.at < now:
                debt -= (now - bucket.at) * capacity
                debt = debt if debt > 0 else 0
                bucket.at = now
            if debt > most:
                full.append(take)
            bucket.debt = debt = debt + amount
            left = capacity + -debt // period_ms
            remaining.append(left if left > 0 else 0)
            reset_ms.append(-(-debt // capacity))
        holders = []
        for slot in bucket_request.slots:
            held = self._slots.get((group, slot.key))
            if held is None:
                held = self._slots[(group, slot.key)] = set()
            holders.append(held)
            if len(held) >= slot.limit:
                full.append(slot)
        shadow = tuple([each.key for each in full if each.shadow]) if full else ()
        refused = tuple([each.key for each in full if not each.shadow]) if full else ()
        accounts = self._accounts_of(group, hold) if hold is not None else []
        if accounts is None:
            counts = tuple([len(held) for held in holders])
            return Denial(_given_back(taken), counts, refused, shadow=shadow, unseeded=True)
        free: list[int] = []
        granted = need = 0
        if hold is not None and accounts:
            for number, account in enumerate(accounts):
                free.append(hold.caps[number].cap - account.spent - account.held)
            granted, need = min(hold.want, *free), hold.need
        if refused or (free and min(free) < need):
            caps = hold.caps if hold is not None else ()
            return Denial(
                _given_back(taken),
                tuple([len(held) for held in holders]),
                refused,
                tuple([cap.key for cap, left in zip(caps, free, strict=True) if left < need]),
                shadow,
                max(0, min(free, default=0)),
            )
        for held in holders:
            held.add(bucket_request.id)
        for account in accounts:
            account.held += granted
        used = tuple([len(held) for held in holders])
        grant = BucketGrant(tuple(remaining), tuple(reset_ms), granted, used, shadow, takes)
        if bucket_request.lease_ms == 0:
            return grant
        expires = now + bucket_request.lease_ms
        key = group, bucket_request.id
        self._records[key] = _Record(bucket_request, taken.amounts, granted, expires, grant, taken)
        self._leases.add(key, expires)
        return grant

    def _taken_of(self, group: str, takes: Sequence[Take], now: int) -> _Taken:
        """The takes with their buckets, as they were left. A new one is full."""
        known = self._of_takes.get(id(takes))
        if known is not None and known.takes is takes and known.group == group:
            return known
        of_group = self._buckets.setdefault(group, {})
        rows: list[_Row] = []
        for take in takes:
            bucket = of_group.get(take.key)
            if bucket is None:
                bucket = of_group[take.key] = _Bucket(0, now)
            capacity, period_ms, amount = take.capacity, take.period_ms, take.amount
            most = (capacity - amount) * period_ms
            most += sum([row[3] for row in rows if row[0] is bucket])
            rows.append((bucket, capacity, period_ms, amount * period_ms, most, take))
        if len(self._of_takes) >= _MAX_TUPLES:
            self._of_takes.clear()
        amounts = tuple([take.amount for take in takes])
        made = self._of_takes[id(takes)] = _Taken(group, takes, amounts, tuple(rows))
        return made

    def _accounts_of(self, group: str, hold: Hold) -> list[_MoneyAccount] | None:
        """The caps' accounts, after `spent` is applied; None where one is unseeded, and the hold does
        not seed it."""
        accounts = []
        for cap in hold.caps:
            account = self._accounts.get((group, cap.key))
            if not hold.seeds and (account is None or not account.seeded):
                return None
            if account is None:
                account = self._accounts[(group, cap.key)] = _MoneyAccount(0, 0, seeded=False)
            if not account.seeded:
                account.spent, account.seeded = account.spent + cap.spent, True
            elif account.spent < cap.spent:
                account.spent = cap.spent
            accounts.append(account)
        return accounts

    def _hold_more(self, record: _Record, need: int, want: int) -> int:
        hold = record.bucket_request.hold
        if hold is None or not hold.caps or want <= 0:
            return 0
        accounts = [
            (cap.cap, self._accounts[(record.bucket_request.group, cap.key)]) for cap in hold.caps
        ]
        if not all(account.seeded for _, account in accounts):
            return -1
        granted = min(want, *(cap - account.spent - account.held for cap, account in accounts))
        if granted < max(need, 1):
            return 0
        for _, account in accounts:
            account.held += granted
        record.held += granted
        return granted

    def _set_amounts(self, group: str, record: _Record, amounts: Sequence[int], now: int) -> None:
        """Set the takes to `amounts`; takes beyond its length are unchanged."""
        taken = record.taken or self._taken_of(group, record.bucket_request.takes, now)
        for row, more in zip(taken.rows, map(sub, amounts, record.amounts), strict=False):
            if more == 0:
                continue
            bucket, capacity, period_ms = row[:3]
            debt = bucket.debt
            if bucket.at < now:
                debt -= (now - bucket.at) * capacity
                debt, bucket.at = debt if debt > 0 else 0, now
            debt += more * period_ms
            bucket.debt = debt if debt > 0 else 0
        record.amounts = [*amounts, *record.amounts[len(amounts) :]]

    def _expire(self, now: int) -> None:
        """Expired leases return their slots and the amounts above `keep`, and their money too unless
        the reservation is kept: then it is returned `KEPT_MS` later."""
        for key in self._leases.due(now):
            record = self._records[key]
            group = key[0]
            waits = record.live and record.kept and record.held > 0
            if record.live:
                self._end_lease(group, record, now)
            if waits:
                record.expires = now + KEPT_MS
                self._leases.add(key, record.expires)
            else:
                self._return_money(record, 0)
                del self._records[key]

    def _end_lease(self, group: str, record: _Record, now: int) -> None:
        record.live = False
        self._release_slots(record)
        takes = record.bucket_request.takes
        kept = [min(take.keep, held) for take, held in zip(takes, record.amounts, strict=True)]
        self._set_amounts(group, record, kept, now)

    def _return_money(self, record: _Record, spent: int) -> None:
        hold = record.bucket_request.hold
        for cap in hold.caps if hold is not None else ():
            account = self._accounts[(record.bucket_request.group, cap.key)]
            account.held -= record.held
            account.spent += spent

    def _release_slots(self, record: _Record) -> None:
        for slot in record.bucket_request.slots:
            self._slots[(record.bucket_request.group, slot.key)].discard(record.bucket_request.id)

    def _sweep(self, now: int) -> None:
        """Drop buckets unused for longer than the longest period."""
        self._of_takes.clear()
        for record in self._records.values():
            record.taken = None
        for group, buckets in list(self._buckets.items()):
            left = {key: each for key, each in buckets.items() if now - each.at <= _IDLE_MS}
            if left:
                self._buckets[group] = left
            else:
                del self._buckets[group]

    def _now(self) -> int:
        return round(self._clock.monotonic() * 1000)


def _given_back(taken: _Taken) -> tuple[BucketState, ...]:
    """The states of the buckets after the takes are undone, since the request is refused."""
    for bucket, _, _, amount, _, _ in taken.rows:
        bucket.debt -= amount
    states = []
    for bucket, capacity, period_ms, amount, _, take in taken.rows:
        debt = bucket.debt
        remaining, reset = max(0, capacity + -debt // period_ms), -(-debt // capacity)
        wait = None
        if take.amount <= capacity:
            wait = max(0, -(-(debt + amount - capacity * period_ms) // capacity))
        states.append(BucketState(take.key, capacity, period_ms, remaining, reset, wait))
    return tuple(states)
