"""Background work on API keys: polls the epoch of changes, ends what runs for keys whose right has
ended, and writes when each key was last used."""

import asyncio
import logging

from core.tenants.key_cache import POLL_S, KeyCache
from gateway.edge.threads import Work, run_as
from gateway.serving.running_rights import RunningRights

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
