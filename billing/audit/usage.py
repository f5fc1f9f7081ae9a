"""Audit checks of batches, events, charges, prices and roll-ups."""

from typing import Any

from msgspec import structs
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from billing.closing.row_sums import DIVIDED, UNEQUAL, RowSums
from billing.columns import PART_QUANTITIES
from billing.differences import EVERYTHING, Difference, Since, duplicated, lost
from billing.pricing.component_columns import count_of
from billing.pricing.pricing import Component
from billing.usage import retention
from billing.usage.border import border_of
from billing.usage.event_components import decode_components
from billing.usage.tables import Charge, ParkedEvent, UsageBatch, UsageEventRow
from core.events import Components

E, C = UsageEventRow, Charge
_NOTHING = Components()


def first_id(session: Session, since: Since) -> str:
    """Events below the retention floor are dropped."""
    dropped = retention.latest_retention(session)
    return max(since.id, dropped.floor_id if dropped else "")


def _here(session: Session) -> list[Any]:
    """Batches whose events are not moved to their store."""
    border = border_of(session)
    if border is None:
        return []
    return [or_(UsageBatch.id > border.last_batch, UsageBatch.id <= border.after_batch)]


def batches_and_events(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """Each batch has as many events as it was stored with."""
    counted = (
        select(E.batch_id, func.count().label("events"))
        .where(E.batch_id > since.batch)
        .group_by(E.batch_id)
        .subquery("counted")
    )
    rows = session.execute(
        select(UsageBatch.id, UsageBatch.events, func.coalesce(counted.c.events, 0))
        .outerjoin(counted, counted.c.batch_id == UsageBatch.id)
        .where(UsageBatch.id > since.batch, *_here(session))
        .where(UsageBatch.events != func.coalesce(counted.c.events, 0))
    )
    found = []
    for batch_id, stored, there in rows:
        kind = "lost" if there < stored else "duplicated"
        message = f"batch {batch_id} was stored with {stored} events, it has {there}"
        found.append(Difference("batches/events", kind, message, abs(stored - there)))
    return found


def events_and_charges(
    session: Session, since: Since = EVERYTHING, rows: RowSums | None = None
) -> list[Difference]:
    """Each event of a rated batch has one charge with the same counts, and vice versa."""
    found: list[Difference] = []
    if rows is None or not rows.every_event_has_its_charge:
        found += _events_without_charge(session, since)
    if rows is None or not rows.every_charge_has_its_event:
        found += _charges_that_differ(session, since)
    if rows is None or rows.divided:
        found += _components_that_differ(session, since)
    return found


def _events_without_charge(session: Session, since: Since) -> list[Difference]:
    missing = session.scalars(
        select(E.request_id)
        .join(UsageBatch, UsageBatch.id == E.batch_id)
        .outerjoin(C, C.request_id == E.request_id)
        .outerjoin(ParkedEvent, ParkedEvent.request_id == E.request_id)
        .where(
            C.request_id.is_(None),
            ParkedEvent.request_id.is_(None),
            UsageBatch.rated_at.is_not(None),
            UsageBatch.id > since.batch,
        )
    )
    return lost("events/charges", "the event is in a rated batch but has no charge", missing)


def _components_that_differ(session: Session, since: Since) -> list[Difference]:
    """A charge has the components of its event, and they are no more than its totals."""
    columns = [getattr(C, name) for name in PART_QUANTITIES]
    left = [count_of(each, C) for each in (Component.INPUT, Component.OUTPUT)]
    rows = session.execute(
        select(C.request_id, E.components, *left, *columns)
        .join(E, E.request_id == C.request_id)
        .where(E.batch_id > since.batch, DIVIDED)
        .order_by(C.request_id)
    )
    wrong, exceeding = [], []
    for request_id, text, given, made, *counts in rows:
        if tuple(counts) != structs.astuple(decode_components(text) if text else _NOTHING):
            wrong.append(request_id)
        if min(given, made) < 0:
            exceeding.append(request_id)
    found = []
    if wrong:
        message = "the components of the charge differ from those of its event"
        found.append(
            Difference("events/charges", "amount", message, len(wrong), 0, tuple(wrong[:20]))
        )
    if exceeding:
        message = "the components of the charge are more than its tokens"
        ids = tuple(exceeding[:20])
        found.append(Difference("events/charges", "amount", message, len(exceeding), 0, ids))
    return found


def _charges_that_differ(session: Session, since: Since) -> list[Difference]:
    alone = session.scalars(
        select(C.request_id)
        .outerjoin(E, E.request_id == C.request_id)
        .where(E.request_id.is_(None), C.request_id >= first_id(session, since))
    )
    found = duplicated("events/charges", "the charge has no event", alone)
    unequal = session.scalars(
        select(C.request_id)
        .join(E, E.request_id == C.request_id)
        .where(E.batch_id > since.batch, UNEQUAL)
    ).all()
    if unequal:
        message = "the counts of the charge differ from those of its event"
        found.append(
            Difference("events/charges", "amount", message, len(unequal), 0, tuple(unequal[:20]))
        )
    return found
