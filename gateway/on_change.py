"""Views of the database in memory that are read anew once somebody changed something.

Whatever is changed goes to the audit log, and that moves the epoch, which the keyring polls: so a
look here costs no query, and a change is seen within the second.
"""

import asyncio
import logging
from collections.abc import Callable

from core.tenants.keyring import Keyring

log = logging.getLogger("tollhouse.views")
LOOK_S = 0.4


async def on_change(keyring: Keyring, refresh: Callable[[], None], what: str) -> None:
    """Calls `refresh` in a thread. For ever; while the database is down the last view stands."""
    read: int | None = None
    while True:
        epoch = keyring.epoch
        if epoch != read:
            try:
                await asyncio.to_thread(refresh)
                read = epoch
            except Exception as error:
                log.warning("%s could not be read, the known ones stay: %s", what, error)
        await asyncio.sleep(LOOK_S)
