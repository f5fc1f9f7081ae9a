"""Refreshes in-memory views of the database after a change.

Every change is written to the audit log, which advances the epoch that the keyring polls. Checking
the epoch costs no query, and a change is visible within a second.
"""

import asyncio
import logging
from collections.abc import Callable

from core.tenants.keyring import Keyring

log = logging.getLogger("tollhouse.views")
LOOK_S = 0.4


async def on_change(keyring: Keyring, refresh: Callable[[], None], what: str) -> None:
    """Runs `refresh` in a thread, until cancelled. While the database is down the last view stays."""
    read: int | None = None
    while True:
        epoch = keyring.epoch
        if epoch != read:
            try:
                await asyncio.to_thread(refresh)
                read = epoch
            except Exception as error:
                log.warning("could not refresh %s, keeping the last known ones: %s", what, error)
        await asyncio.sleep(LOOK_S)
