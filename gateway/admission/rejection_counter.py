"""Counts rejections: in the metric, and by limits per tenant for the database, with queue waits.

A crash loses the counts since the last write. They are shown to people; nothing is billed by them.
"""

import asyncio
import logging
from collections import defaultdict

from core import metrics
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError
from core.tenants.rejections import RejectionCount, add
from gateway.admission.rejections import Rejection

log = logging.getLogger("tollhouse.rejections")
FLUSH_S = 5.0


class RejectionCounter:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def count(self, error: TollhouseError, tenant_id: str | None) -> None:
        """Count a rejected request, once, under one reason. `tenant_id` is None before
        authentication."""
        reason = getattr(error, "reason", "") or error.code
        metrics.rejections.labels(reason).inc()
        if tenant_id is not None and isinstance(error, Rejection):
            self._counts[tenant_id, reason][0] += 1

    def waited(self, tenant_id: str, reason: str, ms: int) -> None:
        sums = self._counts[tenant_id, reason]
        sums[1] += 1
        sums[2] += ms

    def flush(self) -> None:
        """Blocking. Counts that cannot be written are kept for the next flush."""
        taken, self._counts = self._counts, defaultdict(lambda: [0, 0, 0])
        if not taken:
            return
        hour = self._clock.now().replace(minute=0, second=0, microsecond=0)
        try:
            with self._database.transaction() as session:
                add(
                    session,
                    [
                        RejectionCount(tenant, hour, reason, *s)
                        for (tenant, reason), s in taken.items()
                    ],
                )
        except Exception as error:
            log.warning("could not write rejection counts, retrying in %.0f s: %s", FLUSH_S, error)
            for key, sums in taken.items():
                self._counts[key] = [a + b for a, b in zip(self._counts[key], sums, strict=True)]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await asyncio.to_thread(self.flush)
