"""How a worker takes its share of the batches that wait: what one holds, the others pass over."""

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from billing.models import UsageBatch

_LOOKED_AT = 200  # batches in one go


def claim_batches(session: Session, *waiting: ColumnElement[bool], most_events: int) -> list[int]:
    """Ids of batches that no other worker holds, oldest first, at least one if there is any. They
    are held until the transaction ends."""
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
