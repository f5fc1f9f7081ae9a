"""Preloads recently used adapters on all replicas of their model in the background, so that a request
rarely waits for a load.

Adapters that were removed from the catalog are unloaded.
"""

import asyncio
import logging
from datetime import timedelta

from sqlalchemy import func, select

from billing.usage.tables import UsageEventRow
from core import metrics
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError
from core.ids import REQUEST, floor_id
from gateway.catalog.catalog import Catalog, NamedAdapter
from gateway.edge.threads import Work, run_as
from gateway.engines.routing.adapter_loads import MAX_PRELOADED
from gateway.engines.routing.replicas import Replica
from gateway.engines.routing.router import Router

log = logging.getLogger("tollhouse.routing")
POLL_S = 2.0
_RETRY_AFTER_S = 60.0  # before a failed load is retried
_LOOK_BACK = timedelta(hours=1)


class AdapterPreloader:
    def __init__(self, router: Router, catalog: Catalog, database: Database, clock: Clock) -> None:
        self._router = router
        self._catalog = catalog
        self._database = database
        self._clock = clock
        self._known: dict[str, NamedAdapter] = {}
        self._failed: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        try:
            for digest, times in await run_as(Work.OWN, self._recent):
                self._router.popularity.note(digest, float(times))
        except Exception as error:
            log.warning("cannot read recent traffic; adapters load on first use: %s", error)
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.round()
            except Exception:
                log.exception("preloading adapters failed")

    async def round(self) -> int:
        """Preload and unload, in parallel over replicas and one adapter at a time on each.

        Returns the number of loads."""
        known = {each.digest: each for each in self._catalog.every_adapter()}
        removed, self._known = self._known.keys() - known.keys(), known
        if not known and not removed:
            return 0
        work = []
        for model, replicas in self._router.models():
            of_model = {digest for digest, each in known.items() if each.base_model == model}
            popular = [known[digest] for digest in self._router.popularity.most_used(of_model)]
            work += [
                self._preload(replica, popular, removed) for replica in replicas if replica.serves()
            ]
        return sum(await asyncio.gather(*work))

    async def _preload(
        self, replica: Replica, popular: list[NamedAdapter], removed: set[str]
    ) -> int:
        for digest in [each for each in removed if replica.has(each)]:
            try:
                await replica.client.unload_adapter(digest)
            except TollhouseError as error:
                log.info("%s cannot unload %s: %s", replica.name, digest[:12], error.message)
        loaded = 0
        for adapter in popular:
            if not replica.has(adapter.digest) and self._may_try(replica, adapter):
                loaded += await self._load(replica, adapter)
        return loaded

    async def _load(self, replica: Replica, adapter: NamedAdapter) -> int:
        try:
            await self._router.loads.ensure(replica, adapter)
        except TollhouseError as error:
            self._failed[replica.name, adapter.digest] = self._clock.monotonic()
            log.warning("%s cannot load %s: %s", replica.name, adapter.name, error.message)
            return 0
        metrics.adapter_preloads.labels(replica.name).inc()
        return 1

    def _may_try(self, replica: Replica, adapter: NamedAdapter) -> bool:
        failed = self._failed.get((replica.name, adapter.digest))
        return failed is None or self._clock.monotonic() - failed > _RETRY_AFTER_S

    def _recent(self) -> list[tuple[str, int]]:
        """(digest, requests) of the last hour's adapters. Request ids begin with a timestamp."""
        since = floor_id(REQUEST, self._clock.now() - _LOOK_BACK)
        count = func.count()
        query = (
            select(UsageEventRow.adapter_digest, count)
            .where(UsageEventRow.request_id >= since, UsageEventRow.adapter_digest.is_not(None))
            .group_by(UsageEventRow.adapter_digest)
            .order_by(count.desc())
            .limit(4 * MAX_PRELOADED)
        )
        with self._database.read() as session:
            return [(str(digest), int(times)) for digest, times in session.execute(query)]
