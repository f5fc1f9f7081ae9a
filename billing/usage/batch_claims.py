"""Claims waiting usage batches for a worker; other workers skip the claimed rows."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Row, select
from sqlalchemy.orm import Session

from billing.usage.tables import UsageBatch

_LOOKED_AT = 1000  # batches per query


def claim_batches(session: Session, *waiting: ColumnElement[bool], most_events: int) -> list[int]:
    """Ids of unclaimed batches, up to `most_events` events but at least one batch: the oldest, then
    others of its shard, then those of other shards, each in their order. The fewer tenants a
    transaction has, the fewer rows of roll-ups and accounts it writes for the same events. The rows
    stay locked until the transaction ends."""
    looked_at = (
        select(UsageBatch.id, UsageBatch.events, UsageBatch.shard)
        .where(*waiting)
        .order_by(UsageBatch.id)
        .limit(_LOOKED_AT)
    )
    found = session.execute(looked_at).all()
    while found:
        chosen = _chosen(found, most_events)
        locked = session.scalars(
            select(UsageBatch.id)
            .where(UsageBatch.id.in_(chosen), *waiting)
            .order_by(UsageBatch.id)
            .with_for_update(skip_locked=True)
        ).all()
        if locked:
            return list(locked)
        found = [row for row in found if row.id not in chosen]  # another worker has them
    return []


def _chosen(found: Sequence[Row[int, int, int]], most_events: int) -> set[int]:
    oldest = found[0].shard
    taken: set[int] = set()
    events = 0
    for row in sorted(found, key=lambda each: (each.shard != oldest, each.shard, each.id)):
        if taken and events + row.events > most_events:
            break
        taken.add(row.id)
        events += row.events
    return taken
