"""Closes days: freezes the sums of the usage that was recorded on a day.

A day holds the batches recorded on it, so late usage belongs to the day on which it arrives and a
closed day never changes. Audits start after the last closed day. They compare the frozen sums with the
rows of closed days only back to the retention floor, because older rows may have been dropped.
"""

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing import partitions
from billing.differences import Difference, Since, amount
from billing.models import Charge, ClosedDay, ParkedEvent, UsageBatch, UsageEventRow
from core.ids import REQUEST, floor_id

DAY = timedelta(days=1)
# A batch is recorded at the start of its transaction and may be committed later.
SETTLED = timedelta(hours=1)
_E, _C, _B = UsageEventRow, Charge, UsageBatch
Sums = dict[str, int]


def close_days(session: Session, now: datetime) -> list[datetime]:
    """Close every whole day whose usage is rated, oldest first; returns the days."""
    closed = []
    last = latest(session)
    first = session.scalar(select(func.min(_B.recorded_at)))
    if first is None:
        return []
    day = last.day + DAY if last else _start(first)
    while day + DAY + SETTLED <= now:
        since = last.last_batch if last else 0
        until = _last_batch(session, since, day + DAY)
        if _unrated(session, until) or _parked(session, since, until):
            break
        last = _close(session, day, last, until, now)
        closed.append(day)
        day += DAY
    return closed


def latest(session: Session) -> ClosedDay | None:
    return session.scalar(select(ClosedDay).order_by(ClosedDay.day.desc()).limit(1))


def closed_days_are_unchanged(session: Session) -> list[Difference]:
    """The rows of each closed day sum to its frozen sums, and no frozen sum was changed."""
    found = []
    dropped = partitions.latest_retention(session)
    floor = dropped.kept_from + DAY if dropped else None
    for day, before in _chain(session):
        name = f"{day.day:%Y-%m-%d}"
        if day.digest != _digest(before.digest if before else "", day.day, day.sums):
            found.append(amount("closed days", f"the frozen sums of {name} were changed", 0))
        if floor is not None and (day.day < floor or _has_dropped(session, day, before)):
            continue
        there = _sums(session, before.last_batch if before else 0, day.last_batch)
        if there != day.sums:
            units = there["units"] - int(day.sums["units"])
            found.append(
                amount("closed days", f"{name} sums to {there}, was closed with {day.sums}", units)
            )
    return found


def _chain(session: Session) -> Iterator[tuple[ClosedDay, ClosedDay | None]]:
    before = None
    for day in session.scalars(select(ClosedDay).order_by(ClosedDay.day)).all():
        yield day, before
        before = day


def _has_dropped(session: Session, day: ClosedDay, before: ClosedDay | None) -> bool:
    """Whether the day held usage of a month that retention has dropped."""
    late = select(func.coalesce(func.sum(_B.events), 0)).where(
        _B.id > (before.last_batch if before else 0), _B.id <= day.last_batch
    )
    return int(session.scalar(late) or 0) < int(day.sums["events"])


def _last_batch(session: Session, since: int, before: datetime) -> int:
    recorded = select(func.max(_B.id)).where(_B.id > since, _B.recorded_at < before)
    return session.scalar(recorded) or since


def _close(
    session: Session, day: datetime, before: ClosedDay | None, last_batch: int, now: datetime
) -> ClosedDay:
    sums = _sums(session, before.last_batch if before else 0, last_batch)
    digest = _digest(before.digest if before else "", day, sums)
    closed = ClosedDay(day=day, last_batch=last_batch, sums=sums, digest=digest, closed_at=now)
    session.add(closed)
    session.flush()
    return closed


def _sums(session: Session, after: int, last: int) -> Sums:
    inside = (_E.batch_id > after, _E.batch_id <= last)
    counted = (_E.input_tokens, _E.cached_tokens, _E.output_tokens, _E.waived_tokens)
    events = session.execute(
        select(func.count(), *(func.coalesce(func.sum(each), 0) for each in counted)).where(*inside)
    ).one()
    charges = session.execute(
        select(func.count(), func.coalesce(func.sum(_C.amount), 0))
        .join(_E, _E.request_id == _C.request_id)
        .where(*inside)
    ).one()
    names = ("events", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
    found = dict(zip(names, map(int, events), strict=True))
    return found | {"charges": int(charges[0]), "units": int(charges[1])}


def _unrated(session: Session, last_batch: int) -> bool:
    waiting = select(_B.id).where(_B.rated_at.is_(None), _B.id <= last_batch).limit(1)
    return session.scalar(waiting) is not None


def _parked(session: Session, after: int, last: int) -> bool:
    """Whether an event of these batches waits for an operator, who may have it charged later."""
    waiting = (
        select(_E.request_id)
        .join(ParkedEvent, ParkedEvent.request_id == _E.request_id)
        .where(_E.batch_id > after, _E.batch_id <= last)
        .where(ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None))
    )
    return session.scalar(waiting.limit(1)) is not None


def _digest(before: str, day: datetime, sums: dict[str, Any]) -> str:
    """Units as text: JSON numbers of some databases lose digits."""
    text = json.dumps([before, day.isoformat(), {k: str(v) for k, v in sorted(sums.items())}])
    return hashlib.sha256(text.encode()).hexdigest()


def _start(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)


def open_usage(session: Session) -> Since:
    """Where usage that is not closed starts. Ids reach back two days, because a request may run for
    hours and wait in a spool before it is recorded."""
    day = latest(session)
    return Since(day.last_batch, floor_id(REQUEST, day.day - DAY)) if day else Since()
