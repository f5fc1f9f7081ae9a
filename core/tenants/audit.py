"""The audit log: every change with its actor, the state before and the state after."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.logs import request_id
from core.tenants import audit_chain, audit_words, epochs
from core.tenants.models import LONGEST_TARGET, AuditEntry
from core.tenants.scope import TenantScope


def record(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    action: str,
    target: str,
    *,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    """Add an entry in the transaction of the change, and advance the epoch."""
    _append(
        session,
        clock,
        scope.tenant_id,
        scope.actor,
        action=action,
        target=target,
        before=before,
        after=after,
    )


def record_operator(
    session: Session,
    clock: Clock,
    actor: str,
    action: str,
    target: str,
    *,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    """For the operator's changes of objects that belong to no tenant, such as plans and roles."""
    _append(session, clock, None, actor, action=action, target=target, before=before, after=after)


def _append(
    session: Session,
    clock: Clock,
    tenant_id: str | None,
    actor: str,
    *,
    action: str,
    target: str,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    epochs.advance(session, tenant_id)
    audit_chain.append(
        session,
        AuditEntry(
            tenant_id=tenant_id,
            at=clock.now(),
            actor=actor,
            action=action,
            target=target[:LONGEST_TARGET],
            before=before,
            after=after,
            request_id=request_id.get(),
        ),
    )


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """None is any. `actor` and `target` are ids; times are from `since` until before `until`."""

    action: str | None = None
    actor: str | None = None
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def entries(
    session: Session,
    scope: TenantScope,
    *,
    limit: int = 100,
    before_id: int | None = None,
    wanted: AuditFilter = AuditFilter(),
) -> list[AuditEntry]:
    """Newest first. `before_id` is the last id of the page before."""
    query = select(AuditEntry).where(AuditEntry.tenant_id == scope.tenant_id)
    if before_id is not None:
        query = query.where(AuditEntry.id < before_id)
    for column, value in (
        (AuditEntry.action, wanted.action),
        (AuditEntry.actor, wanted.actor),
        (AuditEntry.target, wanted.target),
    ):
        if value is not None:
            query = query.where(column == value)
    if wanted.since is not None:
        query = query.where(AuditEntry.at >= wanted.since)
    if wanted.until is not None:
        query = query.where(AuditEntry.at < wanted.until)
    return list(session.scalars(query.order_by(AuditEntry.id.desc()).limit(limit)))


def describe(entry: AuditEntry) -> dict[str, Any]:
    plain = ("id", "actor", "action", "target", "before", "after", "request_id", "digest")
    shown = {name: getattr(entry, name) for name in plain}
    return shown | {"at": entry.at.isoformat(), "changes": audit_words.changes(entry)}
