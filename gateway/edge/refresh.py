"""Refreshes in-memory views of the database after a change.

Every change is written to the audit log, which advances the epoch that the keyring polls. Checking
the epoch costs no query, and a change is visible within a second.
"""

import asyncio
import logging
from collections.abc import Callable

from core.tenants.key_cache import KeyCache
from gateway.edge.threads import Work, run_as

log = logging.getLogger("tollhouse.views")
POLL_S = 0.4


async def refresh_on_change(key_cache: KeyCache, refresh: Callable[[], None], what: str) -> None:
    """Runs `refresh` in a thread, until cancelled. While the database is down the last view stays."""
    read: int | None = None
    while True:
        epoch = key_cache.epoch
        if epoch != read:
            try:
                await run_as(Work.OWN, refresh)
                read = epoch
            except Exception as error:
                log.warning("could not refresh %s, keeping the last known ones: %s", what, error)
        await asyncio.sleep(POLL_S)
