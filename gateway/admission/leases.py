"""Renews the leases of running requests and retries settlements that failed."""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Sequence

from core.counters import Counters
from core.errors import Unavailable
from gateway.admission.planning import LEASE_MS

log = logging.getLogger("tollhouse.admission")

RENEW_EVERY_S = LEASE_MS / 1000 / 3
RETRY_EVERY_S = 0.5
_MAX_UNSETTLED = 200_000  # beyond this the oldest are dropped and their leases expire

_Settlement = tuple[Counters, str, str, Sequence[int], int]


class Leases:
    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Counters] = {}
        self._unsettled: deque[_Settlement] = deque(maxlen=_MAX_UNSETTLED)

    def add(self, counters: Counters, group: str, id: str) -> None:
        self._running[(group, id)] = counters

    async def end(
        self, counters: Counters, group: str, id: str, amounts: Sequence[int], cost_nano: int
    ) -> None:
        self._running.pop((group, id), None)
        try:
            await counters.settle(group, id, amounts, cost_nano)
        except Unavailable:
            self._unsettled.append((counters, group, id, amounts, cost_nano))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.sleep(RETRY_EVERY_S)
            await self.flush()
            if loop.time() - renewed >= RENEW_EVERY_S:
                renewed = loop.time()
                await self._renew()

    async def flush(self) -> int:
        """Retry owed settlements until the counters fail again. Returns how many are left."""
        while self._unsettled:
            counters, group, id, amounts, cost_nano = self._unsettled[0]
            try:
                await counters.settle(group, id, amounts, cost_nano)
            except Unavailable:
                break
            self._unsettled.popleft()
        return len(self._unsettled)

    async def _renew(self) -> None:
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        counters_by_id = {id(counters): counters for counters in self._running.values()}
        for (group, request), counters in self._running.items():
            groups[(id(counters), group)].append(request)
        for (counters_id, group), requests in groups.items():
            try:
                await counters_by_id[counters_id].renew(group, requests, LEASE_MS)
            except Unavailable:
                log.warning("could not renew the leases of %d running requests", len(requests))
                return
