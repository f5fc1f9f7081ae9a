"""The response cache: finds a request's answer, and keeps answers that may be given again."""

import asyncio
import logging
from typing import TYPE_CHECKING

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core import metrics
from core.clock import Clock
from core.database import Database
from core.tenants.key_cache import KeyCache
from core.tenants.models import Tenant
from core.tenants.response_cache import ERASED
from gateway.admission.limiter import Admission
from gateway.edge.refresh import POLL_S
from gateway.edge.threads import Work, run_as
from gateway.serving.cached_answers import AnswerStore, Lookup
from gateway.serving.response_cache.rules import HEADER, find_key, lookup_of

if TYPE_CHECKING:
    from gateway.serving.context import RequestContext

log = logging.getLogger("tollhouse.response_cache")
_SWEEP_S = 30.0


class ResponseCache:
    def __init__(
        self, admission: Admission, clock: Clock, database: Database, keys: KeyCache, max_bytes: int
    ) -> None:
        """`max_bytes` 0: nothing is cached."""
        self.store = AnswerStore(max_bytes)
        self._admission = admission
        self._clock = clock
        self._database = database
        self._key_cache = keys

    def begin(self, ctx: "RequestContext") -> Lookup | None:
        """None for a request that does not use the cache. Raises BadRequest for a header that is not
        understood."""
        if ctx.principal.cache_rule is None and HEADER not in ctx.exchange.headers:
            return None
        return lookup_of(ctx, self.store)

    def find(self, ctx: "RequestContext", lookup: Lookup) -> bool:
        """Whether an answer is found, after admission and screening. Its price is pinned then."""
        assert ctx.reservation is not None
        if lookup.rule is None or ctx.fallback_from:
            return False
        if not self.store.max_bytes:
            lookup.note = "bypass; reason=disabled"
            return False
        find_key(ctx, lookup)
        found = None
        lookup.at = now = self._clock.monotonic()
        if lookup.key is not None and not lookup.refresh:
            found = self.store.get(ctx.principal.tenant_id, lookup.key, now)
        if found is not None and self._admission.reprice_cached(ctx.reservation):
            lookup.hit = found
            age, left = round(now - found.stored_s), max(0, round(found.expires_s - now))
            lookup.note = f"hit; age={age}; ttl={left}"
            lookup.source = f"response cache: answer of {found.request_id}, {age} s old"
        metrics.response_cache.labels(lookup.note.partition(";")[0]).inc()
        return lookup.hit is not None

    async def run(self) -> None:
        """Drops expired and erased answers, until cancelled."""
        read, swept = self._key_cache.epoch, self._clock.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            now, epoch = self._clock.monotonic(), self._key_cache.epoch
            if now - swept > _SWEEP_S:
                swept = now
                self.store.drop_expired(now)
            if epoch != read:
                try:
                    await self._drop_erased()
                    read = epoch
                except SQLAlchemyError as error:
                    log.warning("erased answers are not dropped yet: %s", error)

    async def _drop_erased(self) -> None:
        """Drop what tenants have erased, and the answers of tenants that are closed."""
        tenants = self.store.tenants
        if tenants:
            epochs = await run_as(Work.OWN, self._epochs, tenants)
            for tenant_id in tenants:
                self.store.drop(tenant_id, epochs.get(tenant_id))

    def _epochs(self, tenants: list[str]) -> dict[str, str]:
        query = select(Tenant.id, Tenant.settings).where(
            Tenant.id.in_(tenants), Tenant.status != "closed"
        )
        with self._database.read() as session:
            return {row[0]: str(row[1].get(ERASED, "")) for row in session.execute(query)}
