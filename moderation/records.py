"""Decisions as rows: written in bulk and idempotently, read, exported and forgotten in time."""

import csv
import hashlib
import hmac
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from core.database import insert_new
from core.events import ModerationEvent
from core.tenants.scope import TenantScope
from moderation.models import Decision
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
_PAGE = 1_000


def fingerprint(text: str, secret: bytes) -> str:
    """Keyed SHA-256 of a text: equal texts can be matched, and short ones cannot be guessed."""
    return hmac.new(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


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
    """Make the record of a verdict. Nothing of the text goes in."""
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
        scores={name: round(score, 4) for name, score in verdict.scores.items()},
        spans=tuple((span.start, span.end, span.category) for span in verdict.spans),
        view=verdict.view,
        unscanned=bool(verdict.unscanned),
    )


def store(session: Session, events: Sequence[ModerationEvent]) -> int:
    """Write decisions; one that is there already changes nothing. Returns how many were new."""
    rows = [_row(event) for event in events]
    return insert_new(session, Decision.__table__, rows, "request_id", "direction")  # type: ignore[arg-type]


def _row(event: ModerationEvent) -> dict[str, Any]:
    row = asdict(event)
    row["categories"] = list(event.categories)
    row["spans"] = [list(span) for span in event.spans]
    return row


def decisions(
    session: Session,
    scope: TenantScope,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    action: str | None = None,
    before_id: int | None = None,
    limit: int = 100,
) -> list[Decision]:
    """Return a page of the tenant's decisions, newest first; `before_id` continues a page."""
    query = select(Decision).where(Decision.tenant_id == scope.tenant_id)
    if scope.project_id is not None:
        query = query.where(Decision.project_id == scope.project_id)
    if since is not None:
        query = query.where(Decision.at >= since)
    if until is not None:
        query = query.where(Decision.at < until)
    if action is not None:
        query = query.where(Decision.action == action)
    if before_id is not None:
        query = query.where(Decision.id < before_id)
    return list(session.scalars(query.order_by(Decision.id.desc()).limit(limit)))


def every_decision(
    session: Session, scope: TenantScope, since: datetime, until: datetime
) -> Iterator[Decision]:
    """Yield all of a span of time, newest first, a page in memory at a time."""
    before: int | None = None
    while True:
        page = decisions(session, scope, since=since, until=until, before_id=before, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:
            return
        before = page[-1].id
        session.expunge_all()


def export_csv(found: Iterable[Decision]) -> Iterator[str]:
    """Yield CSV lines, a heading first; lists and scores are JSON in their cell."""
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
    """Return how many decisions there are by action since a moment."""
    rows = session.execute(
        select(Decision.action, func.count())
        .where(Decision.tenant_id == scope.tenant_id, Decision.at >= since)
        .group_by(Decision.action)
    )
    return {action: int(number) for action, number in rows}


def forget_before(session: Session, moment: datetime, batch: int = 5_000) -> int:
    """Delete the oldest decisions made before a moment, at most `batch`; returns how many."""
    oldest = select(Decision.id).where(Decision.at < moment).order_by(Decision.id).limit(batch)
    result = session.execute(delete(Decision).where(Decision.id.in_(oldest.scalar_subquery())))
    return int(result.rowcount)  # type: ignore[attr-defined]
