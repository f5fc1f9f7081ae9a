"""Closes days: freezes and signs the sums of the usage that was recorded on a day.

A day holds the batches recorded on it, so late usage belongs to the day on which it arrives and a
closed day never changes. Audits start after the last closed day. They compare the frozen sums with the
rows of closed days only back to the retention floor, because older rows may have been dropped. Those of
moved days they compare with the rows of their store.

The keys of the signatures come from the settings. Someone who can write only the database can change
rows, sums and digests together, but not sign them.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.archive.comparing import moved_differences
from billing.closing.row_sums import RowSums
from billing.differences import Difference, Since, amount
from billing.usage import partitions, retention
from billing.usage.border import archive_of, border_of
from billing.usage.tables import Charge, ClosedDay, ParkedEvent, UsageBatch, UsageEventRow
from core.ids import REQUEST, floor_id

DAY = timedelta(days=1)
# A batch is recorded at the start of its transaction and may be committed later.
SETTLED = timedelta(hours=1)
_E, _C, _B = UsageEventRow, Charge, UsageBatch
Sums = dict[str, int]
Keys = Sequence[str]  # the first one signs, every one verifies
_VERIFIED_AGAIN = 30  # days in which the rows of every closed day are summed again
_RECENT = timedelta(days=7)


def whole_days(session: Session, now: datetime) -> list[tuple[datetime, int]]:
    """The whole days that may be closed, whose usage is rated, each with its last batch; oldest first."""
    found: list[tuple[datetime, int]] = []
    last = latest(session)
    first = session.scalar(select(func.min(_B.recorded_at)))
    if first is None:
        return []
    day, since = (last.day + DAY, last.last_batch) if last else (_start(first), 0)
    while day + DAY + SETTLED <= now:
        until = _last_batch(session, since, day + DAY)
        if _unrated(session, until) or _parked(session, since, until):
            break
        found.append((day, until))
        day, since = day + DAY, until
    return found


def close_days(session: Session, now: datetime, keys: Keys, rows: RowSums) -> list[datetime]:
    """Close the whole days, of which `rows` are the sums; returns them."""
    last = latest(session)
    closed = []
    for number, (day, until) in enumerate(whole_days(session, now)):
        last = _close(
            session, day, last, (until, now), keys, (rows.sums(number), rows.frozen(number))
        )
        closed.append(day)
    return closed


def drop_old_usage(session: Session, months: int, now: datetime) -> int:
    """Drop the raw rows of months before the last whole `months`, as far as their days are closed.
    Returns the number of dropped events."""
    last = latest(session)
    if last is None or archive_of(session) is not None:  # its days are moved instead
        return 0
    keep_from = min(partitions.retention_start(now, months), last.day + DAY)
    return partitions.drop_before(session, keep_from, now)


def latest(session: Session) -> ClosedDay | None:
    return session.scalar(select(ClosedDay).order_by(ClosedDay.day.desc()).limit(1))


def closed_days_are_unchanged(session: Session, rows: RowSums | None = None) -> list[Difference]:
    """The rows of each closed day sum to its frozen sums, and no frozen sum was changed."""
    return signed_days_are_unchanged(session, rows=rows)


def signed_days_are_unchanged(
    session: Session,
    keys: Keys = (),
    today: datetime | None = None,
    rows: RowSums | None = None,
) -> list[Difference]:
    """As `closed_days_are_unchanged`, with the signatures where there are keys. With `today` the rows
    of the last week and of a thirtieth of the earlier days are read, another one each day. `rows`: the
    sums of all of them, if they are read already.
    """
    found: list[Difference] = []
    dropped = retention.latest_retention(session)
    floor = dropped.kept_from + DAY if dropped else None
    border, signed = border_of(session), False
    for number, (day, before) in enumerate(_chain(session)):
        name = f"{day.day:%Y-%m-%d}"
        if day.digest != _digest(before.digest if before else "", day):
            found.append(amount("closed days", f"the frozen sums of {name} were changed", 0))
        found += _signature_differences(day, name, keys, signed=signed)
        signed = signed or bool(day.signature)
        if today is not None and not _read_on(day.day, today):
            continue
        if day.frozen["groups"] != frozen_sums.stored_groups(session, day.day).digest():
            found.append(amount("closed days", f"the frozen groups of {name} were changed", 0))
        known = before.frozen if before else {}
        if border is not None and border.first_day <= day.day <= border.last_day:
            for message in moved_differences(session, border, day):
                found.append(amount("closed days", f"{name}: {message}", 0))
            found += _moved_unit_differences(session, name, day, known)
            continue
        if floor is not None and (day.day < floor or _has_dropped(session, day, before)):
            continue
        batches = (before.last_batch if before else 0, day.last_batch)
        there = rows.sums(number) if rows else row_sums(session, *batches)
        if there != day.sums:
            units = there["units"] - int(day.sums["units"])
            found.append(
                amount("closed days", f"{name} sums to {there}, was closed with {day.sums}", units)
            )
        groups = (
            frozen_sums.Groups(
                rows.frozen(number), frozen_sums.read_units(session, known, day.frozen)
            )
            if rows
            else frozen_sums.read_groups(session, batches, known, day.frozen)
        )
        if day.frozen["groups"] != groups.digest():
            message = f"charges, ledger entries or credit uses of {name} were changed"
            found.append(amount("closed days", message, 0))
    return found


def _moved_unit_differences(
    session: Session, name: str, day: ClosedDay, known: dict[str, Any]
) -> list[Difference]:
    """Ledger entries and credit uses of a day whose charges are elsewhere."""
    charges = frozen_sums.stored_groups(session, day.day).charges
    units = frozen_sums.read_units(session, known, day.frozen)
    if day.frozen["groups"] == frozen_sums.Groups(charges, units).digest():
        return []
    return [amount("closed days", f"ledger entries or credit uses of {name} were changed", 0)]


def _signature_differences(
    day: ClosedDay, name: str, keys: Keys, *, signed: bool
) -> list[Difference]:
    """`signed`: an earlier day has a signature, so that this one must have one too."""
    if not day.signature:
        return (
            [amount("closed days", f"{name} is not signed, days before it are", 0)]
            if signed
            else []
        )
    if not keys:
        return []
    by_id = {_key_id(key): key for key in keys}
    key_id, _, _ = day.signature.partition(":")
    if key_id not in by_id:
        message = f"{name} is signed with the key {key_id}, which TOLLHOUSE_CLOSING_KEYS lacks"
        return [amount("closed days", message, 0)]
    if not hmac.compare_digest(day.signature, _signature(day.digest, by_id[key_id])):
        return [amount("closed days", f"the signature of {name} is wrong", 0)]
    return []


def _read_on(day: datetime, today: datetime) -> bool:
    return today - day <= _RECENT or (today - day).days % _VERIFIED_AGAIN == 0


def _signature(digest: str, key: str) -> str:
    return f"{_key_id(key)}:{hmac.digest(key.encode(), digest.encode(), 'sha256').hex()}"


def _key_id(key: str) -> str:
    """Names a key without telling it."""
    return hashlib.sha256(f"tollhouse closing key {key}".encode()).hexdigest()[:8]


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
    session: Session,
    day: datetime,
    before: ClosedDay | None,
    until: tuple[int, datetime],
    keys: Keys,
    found: tuple[Sums, frozen_sums.ChargeRows],
) -> ClosedDay:
    """`until`: the last batch, and now. `found`: the day's sums and its groups of charges."""
    last_batch, now = until
    closed = ClosedDay(
        day=day,
        last_batch=last_batch,
        sums=found[0],
        frozen=frozen_sums.freeze(session, day, found[1], before, now),
        closed_at=now,
    )
    closed.digest = _digest(before.digest if before else "", closed)
    closed.signature = _signature(closed.digest, keys[0]) if keys else ""
    session.add(closed)
    session.flush()
    return closed


def row_sums(session: Session, after: int, last: int) -> Sums:
    """Of the batches after the first number up to the second."""
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


def _digest(before: str, day: ClosedDay) -> str:
    """Units as text: JSON numbers of some databases lose digits."""
    sums, frozen = (
        {name: str(value) for name, value in sorted(each.items())}
        for each in (day.sums, day.frozen)
    )
    text = json.dumps([before, day.day.isoformat(), day.last_batch, sums, frozen])
    return hashlib.sha256(text.encode()).hexdigest()


def _start(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)


def open_usage(session: Session) -> Since:
    """What is not closed. Ids reach back two days, because a request may run for hours and wait in a
    spool before it is recorded."""
    day = latest(session)
    return usage_after(day) if day is not None else Since()


def usage_after(day: ClosedDay) -> Since:
    """What came after a closed day. Ids as in `open_usage`."""
    entry, use = int(day.frozen["last_entry"]), int(day.frozen["last_use"])
    return Since(day.last_batch, floor_id(REQUEST, day.day - DAY), entry, use, day.day + DAY)


def sums_of_closed_days(session: Session) -> Sums:
    """All frozen sums together, and the number of days."""
    found: Sums = {"count": 0}
    for day in session.scalars(select(ClosedDay)):
        found["count"] += 1
        for name, value in day.sums.items():
            found[name] = found.get(name, 0) + int(value)
    return found
