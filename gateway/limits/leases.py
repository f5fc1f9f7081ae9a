"""Renews the leases of running requests and retries settlements that failed."""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Sequence

from core.counters import Counters
from core.errors import Unavailable
from gateway.limits.wishes import LEASE_MS

log = logging.getLogger("tollhouse.limits")

RENEW_EVERY_S = LEASE_MS / 1000 / 3
RETRY_EVERY_S = 0.5
_OWED_AT_MOST = 200_000  # beyond this the oldest are dropped and their leases expire

_Settlement = tuple[Counters, str, str, Sequence[int], int]


class Leases:
    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Counters] = {}
        self._owed: deque[_Settlement] = deque(maxlen=_OWED_AT_MOST)

    def add(self, home: Counters, group: str, id: str) -> None:
        self._running[(group, id)] = home

    async def end(
        self, home: Counters, group: str, id: str, amounts: Sequence[int], spent: int
    ) -> None:
        self._running.pop((group, id), None)
        try:
            await home.settle(group, id, amounts, spent)
        except Unavailable:
            self._owed.append((home, group, id, amounts, spent))

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
        while self._owed:
            home, group, id, amounts, spent = self._owed[0]
            try:
                await home.settle(group, id, amounts, spent)
            except Unavailable:
                break
            self._owed.popleft()
        return len(self._owed)

    async def _renew(self) -> None:
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        homes = {id(home): home for home in self._running.values()}
        for (group, request), home in self._running.items():
            groups[(id(home), group)].append(request)
        for (home_id, group), requests in groups.items():
            try:
                await homes[home_id].renew(group, requests, LEASE_MS)
            except Unavailable:
                log.warning("could not renew the leases of %d running requests", len(requests))
                return
