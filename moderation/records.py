"""Stores decisions in bulk and idempotently; reads, exports and deletes them."""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from math import floor
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Table, delete, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core import bulk_insert, compiled
from core.events import ModerationEvent
from core.tenants.scope import TenantScope
from moderation import daily_counts
from moderation.models import ACTED, Decision
from moderation.verdict import Verdict

_COLUMNS = (
    "at",
    "request_id",
    "project_id",
    "key_id",
    "direction",
    "action",
    "categories",
    "policy_version",
    "view",
    "unscanned",
    "text_sha256",
    "scores",
    "spans",
)
_PLAIN = (
    "request_id",
    "tenant_id",
    "project_id",
    "key_id",
    "at",
    "direction",
    "action",
    "policy_version",
    "text_sha256",
    "view",
    "unscanned",
)
_STORED = (*_PLAIN, "categories", "scores", "spans")
_plain = attrgetter(*_PLAIN)
_TABLE: Table = Decision.__table__  # type: ignore[assignment]
_PAGE = 1_000
# Smaller scores are not recorded: most scores are smaller, and no threshold is that low.
_MIN_SCORE = 0.001


def fingerprint(text: str, secret: bytes) -> str:
    """HMAC-SHA-256 of a text: equal texts match, and short texts cannot be guessed."""
    begun = fingerprint_begun(secret)
    begun.update(text.encode("utf-8", "surrogatepass"))
    return fingerprint_ended(begun, secret)


def fingerprint_begun(secret: bytes) -> "hashlib._Hash":
    """The fingerprint of no text yet, for one that is read a piece at a time."""
    return _pads(secret)[0].copy()


def fingerprint_ended(begun: "hashlib._Hash", secret: bytes) -> str:
    """The fingerprint of what `begun` has read."""
    outer = _pads(secret)[1].copy()
    outer.update(begun.digest())
    return outer.hexdigest()


@lru_cache(maxsize=8)
def _pads(secret: bytes) -> "tuple[hashlib._Hash, hashlib._Hash]":
    """HMAC's two keyed hash states: on a short text a third of the time of `hmac.digest`."""
    key = (secret if len(secret) <= 64 else hashlib.sha256(secret).digest()).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(each ^ 0x36 for each in key))
    return inner, hashlib.sha256(bytes(each ^ 0x5C for each in key))


def describe(row: Decision) -> dict[str, Any]:
    """The JSON form of a decision in routes and commands."""
    return {
        "id": row.id,
        "request_id": row.request_id,
        "at": row.at.isoformat(),
        "direction": row.direction,
        "action": row.action,
        "policy_version": row.policy_version,
        "text_sha256": row.text_sha256,
        "categories": row.categories,
        "scores": row.scores,
        "spans": row.spans,
        "view": row.view,
        "unscanned": row.unscanned,
    }


def event_of(
    verdict: Verdict,
    *,
    request_id: str,
    tenant_id: str,
    project_id: str,
    key_id: str,
    at: datetime,
    direction: str,
    text_sha256: str,
) -> ModerationEvent:
    """Make the event of a verdict. It contains no text."""
    return ModerationEvent(
        request_id=request_id,
        tenant_id=tenant_id,
        project_id=project_id,
        key_id=key_id,
        at=at,
        direction=direction,
        action=verdict.action.word,
        policy_version=verdict.policy_version,
        text_sha256=text_sha256,
        categories=verdict.flagged,
        scores=_recorded(verdict.scores),
        spans=tuple([(span.start, span.end, span.category) for span in verdict.spans]),
        view=verdict.view,
        unscanned=bool(verdict.unscanned),
    )


def _recorded(scores: Mapping[str, float]) -> dict[str, float]:
    """To four decimals, by arithmetic: `round` takes more than twice as long."""
    if compiled.recorded_scores is not None and type(scores) is dict:
        return compiled.recorded_scores(scores, _MIN_SCORE)
    return {
        name: floor(score * 10_000 + 0.5) / 10_000
        for name, score in scores.items()
        if score >= _MIN_SCORE
    }


def store(session: Session, events: Sequence[ModerationEvent]) -> int:
    """Store decisions; known ones change nothing. Returns how many were new."""
    passed = [_row(event) for event in events if not _acted(event)]
    acted = [event for event in events if _acted(event)]
    new = _store_acted(session, acted)
    daily_counts.add(session, new)
    return len(new) + bulk_insert.insert_new(
        session, _TABLE, _STORED, passed, "request_id", "direction"
    )


def _acted(event: ModerationEvent) -> bool:
    """The condition of `models.ACTED`, for an event."""
    return event.action != "allow" or event.unscanned


def _store_acted(session: Session, events: Sequence[ModerationEvent]) -> list[ModerationEvent]:
    """Store decisions that acted; returns the new ones, which the daily counts need."""
    if not events:
        return []
    by_key = {(event.request_id, event.direction): event for event in events}
    rows = [
        {name: getattr(event, name) for name in _PLAIN}
        | {name: _plain_json(getattr(event, name)) for name in ("categories", "scores", "spans")}
        for _key, event in sorted(by_key.items())  # a fixed order prevents deadlocks
    ]
    postgres = session.get_bind().dialect.name == "postgresql"
    insert: Any = postgresql.insert if postgres else sqlite.insert
    statement = insert(_TABLE).on_conflict_do_nothing(index_elements=["request_id", "direction"])
    made = session.connection().execute(
        statement.returning(_TABLE.c.request_id, _TABLE.c.direction), rows
    )
    return [by_key[row[0], row[1]] for row in made]


def _plain_json(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _row(event: ModerationEvent) -> tuple[Any, ...]:
    listed = (event.categories, event.scores, event.spans)
    return (*_plain(event), *[msgspec.json.encode(each).decode() for each in listed])


def decisions(
    session: Session,
    scope: TenantScope,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    action: str | None = None,
    acted: bool = False,
    before_id: int | None = None,
    limit: int = 100,
) -> list[Decision]:
    """Return a page of the tenant's decisions, newest first; `before_id` continues a page.

    `acted` leaves out decisions that let a text pass.
    """
    query = select(Decision).where(Decision.tenant_id == scope.tenant_id)
    if scope.project_id is not None:
        query = query.where(Decision.project_id == scope.project_id)
    if since is not None:
        query = query.where(Decision.at >= since)
    if until is not None:
        query = query.where(Decision.at < until)
    if action is not None:
        query = query.where(Decision.action == action)
    if acted:
        query = query.where(ACTED)
    if before_id is not None:
        query = query.where(_older_than(session, before_id))
    # In the order of the index, so that only the newest rows are read.
    ordered = query.order_by(Decision.at.desc(), Decision.id.desc())
    return list(session.scalars(ordered.limit(limit)))


def _older_than(session: Session, decision_id: int) -> ColumnElement[bool]:
    at = session.scalar(select(Decision.at).where(Decision.id == decision_id))
    if at is None:  # deleted since
        return Decision.id < decision_id
    return (Decision.at <= at) & (tuple_(Decision.at, Decision.id) < (at, decision_id))


def every_decision(
    session: Session, scope: TenantScope, since: datetime, until: datetime
) -> Iterator[Decision]:
    """Yield all decisions of a period, newest first, with one page in memory at a time."""
    before: int | None = None
    while True:
        page = decisions(session, scope, since=since, until=until, before_id=before, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:
            return
        before = page[-1].id
        session.expunge_all()


def export_csv(found: Iterable[Decision]) -> Iterator[str]:
    """Yield CSV lines, the header first; lists and scores are JSON in their cell."""
    yield _line(_COLUMNS)
    for decision in found:
        yield _line([_cell(getattr(decision, name)) for name in _COLUMNS])


def _line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    return out.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def counts(session: Session, scope: TenantScope, since: datetime) -> dict[str, int]:
    """Return the number of decisions by action since a time."""
    rows = session.execute(
        select(Decision.action, func.count())
        .where(Decision.tenant_id == scope.tenant_id, Decision.at >= since)
        .group_by(Decision.action)
    )
    return {action: int(number) for action, number in rows}


def forget_before(session: Session, moment: datetime, batch: int = 5_000) -> int:
    """Delete at most `batch` of the oldest decisions made before a time; returns how many."""
    oldest = select(Decision.id).where(Decision.at < moment).order_by(Decision.id).limit(batch)
    result = session.execute(delete(Decision).where(Decision.id.in_(oldest.scalar_subquery())))
    return int(result.rowcount)  # type: ignore[attr-defined]
