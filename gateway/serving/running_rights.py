"""Ends running requests whose right has ended: the key was revoked or has expired, its project was
archived, or its organisation was suspended or closed.
"""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError, Unauthenticated
from core.tenants import keys
from core.tenants.key_cache import POLL_S, Changed, KeyCache
from gateway.answers.deadlines import Deadlines
from gateway.edge.auth.authenticator import suspended
from gateway.edge.threads import Work, run_as


class RunningRights:
    def __init__(self, database: Database, clock: Clock, running: Deadlines) -> None:
        self._database = database
        self._clock = clock
        self._running = running
        # Keys to check, with their tenants; the database may not have answered.
        self._unchecked: dict[str, str] = {}

    def end_expired(self) -> None:
        for owner in self._running.expired(self._clock.now()):
            error = Unauthenticated("This API key has expired.", next_step="Use another key.")
            self._running.end_key(owner.key_id, owner.tenant_id, error)

    async def check(self, changed: Changed) -> None:
        """Reads the keys of the tenants that changed, and ends the requests of those that may not run
        them any more."""
        tenants, unchecked = changed.tenants, self._unchecked
        if tenants is None or tenants:
            known = {key: owner.tenant_id for key, owner in self._running.owners().items()}
            known |= {key: tenant for key, (tenant, _) in self._running.ended.items()}
            unchecked |= {k: t for k, t in known.items() if tenants is None or t in tenants}
            unchecked |= changed.keys
        if not unchecked:
            return
        read = partial(self._read, list(unchecked))
        for key_id, error in (await run_as(Work.REVOCATION, read)).items():
            tenant_id = unchecked.pop(key_id)
            if error is None:
                self._running.ended.pop(key_id, None)
            else:
                self._running.end_key(key_id, tenant_id, error)

    def _read(self, key_ids: Iterable[str]) -> dict[str, TollhouseError | None]:
        """In a thread: why each key may not be used, or None."""
        found: dict[str, TollhouseError | None] = {}
        with self._database.read() as session:
            for key_id in key_ids:
                try:
                    principal = keys.find_by_id(session, key_id, self._clock.now())
                    found[key_id] = suspended() if principal.unpaid else None
                except TollhouseError as error:
                    found[key_id] = error
        return found


# Background work on API keys: polls the epoch of changes, ends what runs for keys whose right has
# ended, and writes when each key was last used.


log = logging.getLogger("tollhouse.keys")
FLUSH_EVERY_S = 30.0


async def watch_keys(key_cache: KeyCache, rights: RunningRights, stop: asyncio.Event) -> None:
    """Run until `stop` is set. While the database is down, retry; log the first failure only."""
    loop = asyncio.get_running_loop()
    flushed, down = loop.time(), False
    while not stop.is_set():
        try:
            rights.end_expired()
            await rights.check(await run_as(Work.REVOCATION, key_cache.poll))
            if loop.time() - flushed > FLUSH_EVERY_S:
                flushed = loop.time()
                await run_as(Work.REVOCATION, key_cache.flush_used)
            down = False
        except Exception as error:
            if not down:
                log.warning("cannot refresh API keys; known keys stay valid: %s", error)
            down = True
        try:
            await asyncio.wait_for(stop.wait(), POLL_S)
        except TimeoutError:
            continue
    if not down:
        await run_as(Work.REVOCATION, key_cache.flush_used)
