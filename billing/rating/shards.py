"""Shards of tenants, leased by rating workers, so that two workers never wait for the same accounts.

A stored batch of usage holds the events of one shard. A lease only decides who rates what: a rating
transaction locks the leases that it uses, so one that was lost is not used, and none is taken from a
running transaction. What is rated is marked in the same transaction, so it is charged once even if two
workers believe that they own a shard. For that reason a worker may take from another what exceeds that
one's share and is in no transaction.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from billing.rating.tables import RatingShard, RatingWorker
from billing.usage.tables import UsageBatch

LEASE = timedelta(seconds=15)
_WAITING = (UsageBatch.rated_at.is_(None), UsageBatch.refused_at.is_(None))
_SHARED_FROM = 5_000  # waiting events; fewer are rated in one transaction


def waiting(session: Session) -> set[int]:
    """The shards with usage that is to be rated."""
    unrated = select(UsageBatch.shard).where(*_WAITING)
    return set(session.scalars(unrated.distinct()))


def claim(session: Session, worker: str, now: datetime) -> list[int]:
    """Lease this worker's share of the shards with waiting usage, and release what exceeds it. What
    is free comes first, then what others hold beyond their share. Shards in another worker's
    transaction are left alone."""
    wanted = waiting(session)
    share = -(-len(wanted) // (1 + _others(session, worker, now)))
    rows = session.scalars(
        select(RatingShard).order_by(RatingShard.shard).with_for_update(skip_locked=True)
    ).all()
    own = [row for row in rows if row.worker == worker and row.shard in wanted]
    free = [row for row in rows if row.shard in wanted and _is_free(row, now)]
    taken = [*own, *(row for row in free if row not in own)]
    if len(taken) < share:
        others = [row for row in rows if row.shard in wanted and row not in taken]
        taken += _excess(session, others, share, now)
    taken = taken[:share]
    for row in rows:
        if row in taken:
            row.worker, row.leased_until = worker, now + LEASE
        elif row.worker == worker:
            row.worker = row.leased_until = None
    session.flush()
    return [row.shard for row in taken]


def _excess(
    session: Session, rows: Sequence[RatingShard], share: int, now: datetime
) -> list[RatingShard]:
    """Those of the rows with which other workers hold more than their share."""
    held = Counter(
        session.scalars(select(RatingShard.worker).where(RatingShard.leased_until >= now))
    )
    found = []
    for row in rows:
        if held[row.worker] > share:
            held[row.worker] -= 1
            found.append(row)
    return found


def next_part(session: Session, leased: Collection[int], most_events: int) -> tuple[list[int], int]:
    """The shards of a worker's next transaction, those with the oldest batches, and about how many
    events it rates: no more than half of what waits, so that another worker finds some to take."""
    events = func.sum(UsageBatch.events)
    by_shard = session.execute(
        select(UsageBatch.shard, events)
        .where(*_WAITING, UsageBatch.shard.in_(leased))
        .group_by(UsageBatch.shard)
        .order_by(func.min(UsageBatch.id))
    ).all()
    most = min(most_events, max(_SHARED_FROM, sum(row[1] for row in by_shard) // 2))
    chosen, counted = [], 0
    for shard, waits in by_shard:
        chosen.append(shard)
        counted += waits
        if counted >= most:
            break
    return chosen, most


def hold(session: Session, worker: str, shards: Collection[int], now: datetime) -> list[int]:
    """Lock the leases of these shards until the transaction ends; returns those that are still the
    worker's. One that another worker's transaction locks is left alone: that worker may stand still."""
    free = (
        select(RatingShard.shard)
        .where(RatingShard.shard.in_(shards), RatingShard.worker == worker)
        .order_by(RatingShard.shard)
        .with_for_update(skip_locked=True)
    )
    held = session.scalars(
        update(RatingShard)
        .where(RatingShard.shard.in_(session.scalars(free).all()))
        .values(leased_until=now + LEASE)
        .returning(RatingShard.shard)
        .execution_options(synchronize_session=False)
    )
    return list(held)


def release(session: Session, worker: str) -> None:
    """Give back what the worker leases. One that is killed does not; then its leases run out."""
    session.execute(
        update(RatingShard)
        .where(RatingShard.worker == worker)
        .values(worker=None, leased_until=None)
        .execution_options(synchronize_session=False)
    )
    session.execute(delete(RatingWorker).where(RatingWorker.worker == worker))


def _others(session: Session, worker: str, now: datetime) -> int:
    """The number of other workers; registers this one, and forgets those that ended long ago."""
    session.merge(RatingWorker(worker=worker, alive_until=now + LEASE))
    ended = select(RatingWorker.worker).where(RatingWorker.alive_until < now - 100 * LEASE)
    gone = session.scalars(ended.with_for_update(skip_locked=True)).all()
    if gone:
        forget = delete(RatingWorker).where(RatingWorker.worker.in_(gone))
        session.execute(forget.execution_options(synchronize_session=False))
    alive = select(func.count()).select_from(RatingWorker)
    found = session.scalar(
        alive.where(RatingWorker.worker != worker, RatingWorker.alive_until >= now)
    )
    return found or 0


def _is_free(row: RatingShard, now: datetime) -> bool:
    return row.leased_until is None or row.leased_until < now
