"""Leases on the counters, also while the shared counters do not answer.

The declared failure mode decides about new reservations: `closed` refuses requests; `local` lets this
process grant its share of every limit by itself. Money fails closed in both. Each response's headers
and a metric state the mode. The leases of running requests are renewed, and settlements that failed
are retried.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Protocol

from core import metrics
from core.clock import Clock
from core.counters import BucketGrant, BucketRequest, Counters, Denial, nano_ceil
from core.counters_memory import MemoryCounters
from core.errors import DependencyDown, Unavailable
from gateway.admission.request import AdmissionRequest
from gateway.admission.reservation import LEASE_MS, PlannedBuckets, plan_buckets

log = logging.getLogger("tollhouse.admission")

MODES = {"shared": 0, "local": 1, "closed": 2}
RENEW_EVERY_S = LEASE_MS / 1000 / 3
RETRY_EVERY_S = 0.5
_KEEP_AFTER_S = 0.02  # much less than a lease; of requests that end before, nothing is told
_AT_ONCE = 128  # settlements that are retried together
# Of settlements without a cost; beyond it the oldest are dropped and their leases expire. Those with a
# cost are as many as requests ran when the counters failed, because new ones are refused meanwhile.
_MAX_UNSETTLED = 200_000

KeepNow = Callable[[str, str], None]
_Settlement = tuple[Counters, str, str, Sequence[int], int]


class FailoverCounters:
    def __init__(self, shared: Counters, clock: Clock, *, mode: str, processes: int) -> None:
        self.shared = shared
        self._local = MemoryCounters(clock)
        self._mode = mode
        self._shares = max(1, processes)
        self._reported_mode = ""  # the mode that the metric shows

    def choose(self, *, needs_money: bool) -> tuple[Counters, int]:
        """(counters, divisor of the limits). Skips the shared counters when they are known to be down."""
        if getattr(self.shared, "down", False):
            return self._fall_back(needs_money), self._shares
        return self.shared, 1

    async def reserve(
        self, counters: Counters, planned: PlannedBuckets, request: AdmissionRequest, estimate: int
    ) -> tuple[BucketGrant | Denial, Counters]:
        try:
            answer = await counters.reserve(planned.bucket_request)
        except Unavailable:
            local = self._fall_back(bool(request.money))
            local_plan = plan_buckets(request, estimate, shares=self._shares)
            return await local.reserve(local_plan.bucket_request), local
        if counters is self.shared:
            self._report_mode("shared")
        return answer, counters

    def _fall_back(self, needs_money: bool) -> Counters:
        self._report_mode(self._mode)
        if self._mode == "local" and not needs_money:
            return self._local
        raise counters_down("money" if needs_money else "limits")

    def _report_mode(self, mode: str) -> None:
        if mode != self._reported_mode:
            self._reported_mode = mode
            metrics.limit_mode.set(MODES[mode])


def counters_down(what: str) -> DependencyDown:
    return DependencyDown(
        f"The counters do not answer, so {what} cannot be checked.",
        next_step="Retry in a second; the operator checks TOLLHOUSE_REDIS_URL.",
        code="limits_unavailable",
        retry_after_s=1.0,
    )


class Leased(Protocol):
    """What holds a lease: a request's reservation, or a permit of an upstream."""

    counters: Counters
    held_units: int  # picounits
    kept: bool  # its record is durable, so its money outlives its lease

    @property
    def bucket_request(self) -> BucketRequest: ...


class Leases:
    def __init__(self, shared: Counters) -> None:
        self._shared = shared
        self._began: int | None = None  # when the shared counters' data began, in ms
        self._running: dict[tuple[str, str], Leased] = {}
        self._unkept: dict[tuple[str, str], Leased] = {}  # to be kept, not answered yet
        self._soon: list[tuple[str, str]] = []  # of them, what the keeper did not ask for yet
        self._keeper: asyncio.Task[None] | None = None
        # Owed, by the order in which they failed. What is added while others are retried moves none.
        self._spent: dict[int, _Settlement] = {}
        self._free: dict[int, _Settlement] = {}  # without a cost
        self._numbers = count()

    def add(self, reservation: Leased) -> None:
        bucket_request = reservation.bucket_request
        self._running[(bucket_request.group, bucket_request.id)] = reservation

    def keep(self, reservation: Leased) -> None:
        """Tell the counters, without waiting, that the request's record is durable, so that its money
        waits for the settlement if this process dies."""
        bucket_request = reservation.bucket_request
        reservation.kept = True
        keep_now: KeepNow | None = getattr(reservation.counters, "keep_now", None)
        if keep_now is not None:  # counters in memory answer at once: no task is needed
            keep_now(bucket_request.group, bucket_request.id)
            return
        name = (bucket_request.group, bucket_request.id)
        self._unkept[name] = reservation
        self._soon.append(name)
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep_soon())

    async def _keep_soon(self) -> None:
        while self._soon:  # more may come while the counters are asked
            await asyncio.sleep(_KEEP_AFTER_S)
            names, self._soon = self._soon, []
            running = [self._unkept[name] for name in names if name in self._unkept]
            await asyncio.gather(*[self._keep(each) for each in running])

    async def _keep(self, reservation: Leased) -> None:
        """Without an answer it is tried again with the next renewal."""
        bucket_request = reservation.bucket_request
        with contextlib.suppress(Unavailable):
            await reservation.counters.keep(bucket_request.group, bucket_request.id)
            self._unkept.pop((bucket_request.group, bucket_request.id), None)

    async def end(
        self, counters: Counters, group: str, id: str, amounts: Sequence[int], cost_nano: int
    ) -> None:
        reservation = self._running.pop((group, id), None)
        self._unkept.pop((group, id), None)
        try:
            known = await counters.settle(group, id, amounts, cost_nano)
            if not known and cost_nano and reservation is not None and await self._is_lost():
                await self._restore(reservation)
                await counters.settle(group, id, amounts, cost_nano)
        except Unavailable:
            self._owe((counters, group, id, amounts, cost_nano))

    def _owe(self, settlement: _Settlement) -> None:
        *_, cost_nano = settlement
        if cost_nano:
            self._spent[next(self._numbers)] = settlement
            return
        if len(self._free) >= _MAX_UNSETTLED:
            del self._free[next(iter(self._free))]
        self._free[next(self._numbers)] = settlement

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.sleep(RETRY_EVERY_S)
            await self.restore_lost()
            await self.flush()
            if loop.time() - renewed >= RENEW_EVERY_S:
                renewed = loop.time()
                await self._renew()

    async def restore_lost(self) -> int:
        """Enter the running reservations again if the shared counters lost their data; returns how
        many."""
        try:
            began, _ = await self._shared.born()
            lost = self._began is not None and began != self._began
            self._began = began
            if not lost:
                return 0
            log.error("the counters lost their data; running requests are registered again")
            return sum([await self._restore(each) for each in list(self._running.values())])
        except Unavailable:
            return 0

    async def _is_lost(self) -> bool:
        """Whether the data was lost since `restore_lost` looked last."""
        began, _ = await self._shared.born()
        return self._began is not None and began != self._began

    async def _restore(self, reservation: Leased) -> bool:
        if reservation.counters is not self._shared:
            return False
        held = nano_ceil(reservation.held_units)
        entered = await self._shared.restore(reservation.bucket_request, held)
        if reservation.kept:
            await self._keep(reservation)
        return entered

    async def flush(self) -> int:
        """Retry owed settlements until the counters fail again. Returns how many are left."""
        for owed in (self._spent, self._free):
            if not await self._settle_owed(owed):
                break
        return len(self._spent) + len(self._free)

    async def _settle_owed(self, owed: dict[int, _Settlement]) -> bool:
        """Whether all are settled."""
        while owed:
            some = list(islice(owed.items(), _AT_ONCE))
            settled = await asyncio.gather(*[self._has_settled(*each) for _, each in some])
            for (number, _), done in zip(some, settled, strict=True):
                if done:
                    owed.pop(number, None)
            if not all(settled):
                return False
        return True

    async def _has_settled(
        self, counters: Counters, group: str, id: str, amounts: Sequence[int], cost_nano: int
    ) -> bool:
        try:
            await counters.settle(group, id, amounts, cost_nano)
        except Unavailable:
            return False
        return True

    async def _renew(self) -> None:
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        counters_by_id = {id(each.counters): each.counters for each in self._running.values()}
        for (group, request), running in self._running.items():
            groups[(id(running.counters), group)].append(request)
        for (counters_id, group), requests in groups.items():
            try:
                await counters_by_id[counters_id].renew(group, requests, LEASE_MS)
            except Unavailable:
                log.warning("could not renew the leases of %d running requests", len(requests))
                return
        for each in list(self._unkept.values()):
            await self._keep(each)
