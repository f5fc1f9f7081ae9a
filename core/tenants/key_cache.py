"""An in-memory cache of verified API keys, valid until their tenant changes. Also collects the times
of last use, which are written in batches.

While the database is down, keys that are in the cache continue to work.
"""

import logging
import threading
from collections import OrderedDict
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import update

from core.clock import Clock
from core.database import Database
from core.errors import Unauthenticated
from core.tenants import epochs, keys, secrets
from core.tenants.keys import Principal
from core.tenants.models import ApiKey

log = logging.getLogger("tollhouse.keys")

POLL_S = 0.4  # leaves time for the query within the one second of a revocation
_MAX_ENTRIES = 100_000


class Changed(NamedTuple):
    """What a poll brought: the tenants that changed, None for all, and their keys that were in the
    cache with their tenants; of all tenants together there would be too many."""

    tenants: frozenset[str] | None
    keys: dict[str, str]


NOTHING_CHANGED = Changed(frozenset(), {})


class KeyCache:
    """Call `cached` on the event loop; if it returns None, call `find` in a thread."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, Principal] = OrderedDict()
        self._last_used: dict[str, datetime] = {}
        self._epoch = -1
        self._polled_at: float | None = None

    def polled_s_ago(self) -> float | None:
        """How long ago the database answered a poll; None if it has not yet."""
        return None if self._polled_at is None else self._clock.monotonic() - self._polled_at

    @property
    def epoch(self) -> int:
        """The last polled epoch; -1 before the first poll."""
        return self._epoch

    def cached(self, secret: str) -> Principal | None:
        """Looks up the cache only. Unauthenticated for a wrong checksum or an expired cached key."""
        principal = self._cached.get(secrets.digest(secret))
        if principal is None:
            if not secrets.well_formed(secret):
                raise Unauthenticated("Incorrect API key.", next_step="Check it for a typo.")
            return None
        now = self._clock.now()
        if principal.expires_at is not None and principal.expires_at <= now:
            raise Unauthenticated("This API key has expired.", next_step="Use another key.")
        self._last_used[principal.key_id] = now
        return principal

    def find(self, secret: str) -> Principal:
        """Queries the database. Unauthenticated, or Forbidden if the tenant is suspended."""
        now = self._clock.now()
        with self._database.read() as session:
            epoch = epochs.current(session)
            principal = keys.find(session, secret, now)
        with self._lock:
            if self._epoch < 0:  # before the first poll
                self._epoch = epoch
            # A result of an older epoch may be stale: use it once, but do not cache it.
            if epoch >= self._epoch:
                self._cached[secrets.digest(secret)] = principal
                if len(self._cached) > _MAX_ENTRIES:
                    self._cached.popitem(last=False)
        self._last_used[principal.key_id] = now
        return principal

    def poll(self) -> Changed:
        """Drop the keys of the tenants that changed. Call it in a thread, every POLL_S seconds."""
        with self._database.read() as session:
            epoch = epochs.current(session)
            self._polled_at = self._clock.monotonic()
            if epoch == self._epoch:
                return NOTHING_CHANGED
            changed = epochs.changed_since(session, self._epoch)
        with self._lock:
            dropped = [self._cached.pop(digest) for digest in self._digests_of(changed)]
            self._epoch = epoch
        if changed is None:
            return Changed(None, {})
        return Changed(frozenset(changed), {each.key_id: each.tenant_id for each in dropped})

    def flush_used(self) -> int:
        """Write the times of last use and return their number. Call it about every 30 seconds."""
        last_used, self._last_used = self._last_used, {}
        if last_used:
            with self._database.transaction() as session:
                rows = [
                    {"id": key, "last_used_at": moment} for key, moment in sorted(last_used.items())
                ]
                session.execute(update(ApiKey), rows)
        return len(last_used)

    def _digests_of(self, tenants: set[str] | None) -> list[str]:
        return [
            digest
            for digest, principal in self._cached.items()
            if tenants is None or principal.tenant_id in tenants
        ]
