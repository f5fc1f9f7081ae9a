"""Checked keys, kept in memory until the epoch moves; and when each was last used, in batches.

While the database is down the keys that were checked under the present epoch go on working.
"""

import logging
import threading
from collections import OrderedDict
from datetime import datetime

from sqlalchemy import update

from core.clock import Clock
from core.database import Database
from core.errors import Unauthenticated
from core.tenants import epochs, keys, secrets
from core.tenants.keys import Principal
from core.tenants.models import ApiKey

log = logging.getLogger("tollhouse.keys")

POLL_S = 0.4  # with a query's time well inside the second that a revocation may take
_KEPT = 100_000


class Keyring:
    """`known` first, on the event loop; `find` in a thread where it answers None."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Principal] = OrderedDict()
        self._used: dict[str, datetime] = {}
        self._epoch = -1

    @property
    def epoch(self) -> int:
        """As it was polled last; -1 before the first time."""
        return self._epoch

    def known(self, secret: str) -> Principal | None:
        """No query. Unauthenticated for a typo and for a cached key whose time has come."""
        principal = self._known.get(secrets.digest(secret))
        if principal is None:
            if not secrets.well_formed(secret):
                raise Unauthenticated("Incorrect API key.", next_step="Check it for a typo.")
            return None
        now = self._clock.now()
        if principal.expires_at is not None and principal.expires_at <= now:
            raise Unauthenticated("This API key has expired.", next_step="Use another key.")
        self._used[principal.key_id] = now
        return principal

    def find(self, secret: str) -> Principal:
        """One query. Unauthenticated, or Forbidden where the tenant is suspended."""
        now = self._clock.now()
        with self._database.read() as session:
            epoch = epochs.current(session)
            principal = keys.find(session, secret, now)
        with self._lock:
            # Read under an older epoch than the cache's, it may be out of date: serve it once.
            if epoch >= self._epoch:
                self._turn(epoch)
                self._known[secrets.digest(secret)] = principal
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        self._used[principal.key_id] = now
        return principal

    def poll(self) -> None:
        """Forget everything if anything changed. Call it every POLL_S seconds, in a thread."""
        with self._database.read() as session:
            epoch = epochs.current(session)
        with self._lock:
            self._turn(epoch)

    def flush_used(self) -> int:
        """Write when keys were last used; returns how many. Every half minute is plenty."""
        used, self._used = self._used, {}
        if used:
            with self._database.transaction() as session:
                rows = [{"id": key, "last_used_at": moment} for key, moment in sorted(used.items())]
                session.execute(update(ApiKey), rows)
        return len(used)

    def _turn(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._known.clear()
            self._epoch = epoch
