"""In-memory counters of one process, behind one lock: for a single worker, tests and demos."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from core.clock import Clock
from core.counters import (
    KEPT_MS,
    BucketGrant,
    BucketRequest,
    Cap,
    Denial,
    HeldMoney,
    Hold,
    Slot,
    Take,
)
from core.expiries import Expiries
from core.token_buckets import BucketTakes, TokenBuckets, give_back

_SWEEP_EVERY = 5_000  # reservations


@dataclass(slots=True)
class _MoneyAccount:
    spent: int
    held: int
    seeded: bool = True


class _Record(Struct):
    bucket_request: BucketRequest
    amounts: Sequence[int]
    held: int
    expires: int
    grant: BucketGrant
    taken: BucketTakes | None = None  # None: to be looked up
    kept: bool = False  # its money outlives the lease
    live: bool = True  # False once the lease expired


class MemoryCounters:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets = TokenBuckets()
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
            now = self._end_leases()
            known = self._records.get((bucket_request.group, bucket_request.id))
            if known is not None:
                return known.grant
            return self._reserve(bucket_request, now)

    async def extend(
        self, group: str, id: str, amounts: Sequence[int], need: int, want: int
    ) -> int:
        with self._lock:
            now = self._end_leases()
            record = self._records.get((group, id))
            if record is None:
                return -1
            raised = [max(*pair) for pair in zip(record.amounts, amounts, strict=False)]
            self._set_amounts(group, record, raised, now)
            return self._hold_more(record, need, want)

    async def settle(self, group: str, id: str, amounts: Sequence[int], spent: int) -> bool:
        with self._lock:
            now = self._end_leases()
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
            self._end_leases()
            record = self._records.get((group, id))
            if record is not None:
                record.kept = True

    async def renew(self, group: str, ids: Sequence[str], lease_ms: int) -> None:
        with self._lock:
            now = self._end_leases()
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
                self._slots.setdefault((group, slot.key), set()).update(slot.members(id))
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
            self._end_leases()
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
        taken = self._buckets.of(group, takes, now)
        over, remaining, reset_ms = taken.rows.take(now)
        full: list[Take | Slot] = [*over]
        holders = []
        for slot in bucket_request.slots:
            held = self._slots.get((group, slot.key))
            if held is None:
                held = self._slots[(group, slot.key)] = set()
            holders.append(held)
            if len(held) + slot.count > slot.limit:
                full.append(slot)
        shadow = tuple([each.key for each in full if each.shadow]) if full else ()
        refused = tuple([each.key for each in full if not each.shadow]) if full else ()
        accounts = self._accounts_of(group, hold) if hold is not None else []
        if accounts is None:
            counts = tuple([len(held) for held in holders])
            return Denial(give_back(taken), counts, refused, shadow=shadow, unseeded=True)
        free: list[int] = []
        granted = need = 0
        if hold is not None and accounts:
            for number, account in enumerate(accounts):
                free.append(hold.caps[number].cap - account.spent - account.held)
            granted, need = min(hold.want, *free), hold.need
        if refused or (free and min(free) < need):
            caps = hold.caps if hold is not None else ()
            return Denial(
                give_back(taken),
                tuple([len(held) for held in holders]),
                refused,
                tuple([cap.key for cap, left in zip(caps, free, strict=True) if left < need]),
                shadow,
                max(0, min(free, default=0)),
            )
        for slot, held in zip(bucket_request.slots, holders, strict=True):
            if slot.count == 1:
                held.add(bucket_request.id)
            else:
                held.update(slot.members(bucket_request.id))
        for account in accounts:
            account.held += granted
        used = tuple([len(held) for held in holders])
        grant = BucketGrant(remaining, reset_ms, granted, used, shadow, takes)
        if bucket_request.lease_ms == 0:
            return grant
        expires = now + bucket_request.lease_ms
        key = group, bucket_request.id
        self._records[key] = _Record(bucket_request, taken.amounts, granted, expires, grant, taken)
        self._leases.add(key, expires)
        return grant

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
        taken = record.taken or self._buckets.of(group, record.bucket_request.takes, now)
        taken.rows.change(record.amounts, amounts, now)
        record.amounts = [*amounts, *record.amounts[len(amounts) :]]

    def _end_leases(self) -> int:
        """Expired leases return their slots and the amounts above `keep`, and their money too unless
        the reservation is kept: then it is returned `KEPT_MS` later. Returns the time, in ms."""
        now = self._now()
        if self._leases.soonest <= now:
            self._expire(now)
        return now

    def _expire(self, now: int) -> None:
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
            held = self._slots[(record.bucket_request.group, slot.key)]
            if slot.count == 1:
                held.discard(record.bucket_request.id)
            else:
                held.difference_update(slot.members(record.bucket_request.id))

    def _sweep(self, now: int) -> None:
        for record in self._records.values():
            record.taken = None
        self._buckets.sweep(now)

    def _now(self) -> int:
        return round(self._clock.monotonic() * 1000)
