"""Claims waiting usage batches for a worker; other workers skip the claimed rows."""

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from billing.models import UsageBatch

_LOOKED_AT = 200  # batches per query


def claim_batches(session: Session, *waiting: ColumnElement[bool], most_events: int) -> list[int]:
    """Ids of unclaimed batches, oldest first, up to `most_events` events but at least one batch.
    The rows stay locked until the transaction ends."""
    found = session.execute(
        select(UsageBatch.id, UsageBatch.events)
        .where(*waiting)
        .order_by(UsageBatch.id)
        .limit(_LOOKED_AT)
        .with_for_update(skip_locked=True)
    ).all()
    taken: list[int] = []
    events = 0
    for batch_id, size in found:
        if taken and events + size > most_events:
            break
        taken.append(batch_id)
        events += size
    return taken
