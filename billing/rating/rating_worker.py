"""A rating worker: leases shards of tenants and rates what waits in them. Many may run."""

import time
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from billing.rating import rating, shards
from core.clock import Clock
from core.database import Database
from core.ids import new_id

# Long enough to take over the shards of a worker that was killed.
TAKE_OVER_S = shards.LEASE.total_seconds() + 5
_POLL_S = 0.1
_TRIES = 3  # another worker locks the leases for a moment while it takes its share


def rate_all(
    database: Database,
    clock: Clock,
    *,
    patience_s: float = TAKE_OVER_S,
    most_events: int = rating.MOST_EVENTS,
) -> int:
    """Rate all waiting batches; returns the number of events. Usage in shards that other workers have
    leased is theirs: `patience_s` is how long to wait for them to rate it or to share it, in seconds. A
    transaction rates about `most_events`.
    """
    if database.dialect == "sqlite":  # it has one writer, so its workers have nothing to share
        return _rate_alone(database, clock, most_events)
    with database.read() as session:
        if not shards.waiting(session):
            return 0
    worker = new_id("rater")
    events, last_work = 0, time.monotonic()
    try:
        while True:
            rated = _rate_share(database, clock, worker, most_events)
            if rated is None:
                return events
            if rated:
                events, last_work = events + rated, time.monotonic()
            elif time.monotonic() - last_work >= patience_s:
                return events
            else:
                time.sleep(_POLL_S)
    finally:
        with suppress(SQLAlchemyError), database.transaction() as session:
            shards.release(session, worker)


def _rate_alone(database: Database, clock: Clock, most_events: int) -> int:
    events = 0
    while True:
        with database.transaction() as session:
            rated = rating.rate(session, clock, most_events=most_events)
        if rated.batches == 0:
            return events
        events += rated.events


def _rate_share(database: Database, clock: Clock, worker: str, most_events: int) -> int | None:
    """Rate some of this worker's share; None if nothing waits, 0 if others have leased it all."""
    with database.transaction() as session:
        leased = shards.claim(session, worker, clock.now())
        if not leased and not shards.waiting(session):
            return None
    if not leased:
        return 0
    for _ in range(_TRIES):
        with database.transaction() as session:
            part, most = shards.next_part(session, leased, most_events)
            held = shards.hold(session, worker, part, clock.now())
            if held:
                return rating.rate(session, clock, most_events=most, shards=held).events
    return 0
