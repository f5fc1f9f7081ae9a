"""LoRA adapters of tenants: rows that map a tenant's own name to weights, identified by digest."""

import re
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, Forbidden, NotFound
from core.ids import ADAPTER, new_id
from core.tenants import audit
from core.tenants.models import Adapter
from core.tenants.scope import TenantScope, scope_of_operator

# In `model` a colon separates base and adapter; a slash would look like a path.
LONGEST_REASON = 120
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:80]!r} is not a valid adapter name.",
            next_step="Use 1 to 120 letters, digits, dots, hyphens and underscores,"
            " starting with a letter or digit.",
            param="lora_name",
        )
    return name


def register(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    *,
    name: str,
    base_model: str,
    digest: str,
    path: str,
    rank: int,
    bytes: int,
) -> Adapter:
    """Idempotent for the same name and digest; Conflict if the name has another digest."""
    check_name(name)
    held = _quarantined(session, digest)
    if held is not None:
        raise Forbidden(
            f"These weights are in quarantine: {held.quarantine_reason}.",
            next_step="Upload other weights, or ask the operator to release them.",
            param="lora_name",
            code="adapter_quarantined",
        )
    row = session.scalars(
        select(Adapter).where(Adapter.tenant_id == scope.tenant_id, Adapter.name == name)
    ).one_or_none()
    if row is not None and row.removed_at is None:
        if (row.digest, row.base_model) == (digest, base_model):
            return row
        raise Conflict(
            f"An adapter named {name} is already registered with different weights.",
            next_step="Unload it first, or choose another name.",
            param="lora_name",
        )
    before = describe(row) if row is not None else None
    if row is None:
        row = Adapter(id=new_id(ADAPTER), tenant_id=scope.tenant_id, name=name)
        session.add(row)
    row.base_model, row.digest, row.path = base_model, digest, path
    row.rank, row.bytes, row.removed_at = rank, bytes, None
    row.quarantined_at, row.quarantine_reason = None, ""
    row.created_at, row.created_by = clock.now(), scope.actor[:40]
    session.flush()
    audit.record(
        session, scope, clock, "adapter.register", row.id, before=before, after=describe(row)
    )
    return row


def remove(session: Session, scope: TenantScope, clock: Clock, name_or_id: str) -> Adapter:
    row = get(session, scope, name_or_id)
    before = describe(row)
    row.removed_at = clock.now()
    session.flush()
    audit.record(
        session, scope, clock, "adapter.remove", row.id, before=before, after=describe(row)
    )
    return row


def quarantine(session: Session, clock: Clock, digest: str, reason: str) -> list[Adapter]:
    """Keep every tenant from using these weights, until an operator releases them. Each gets an entry
    in its audit log."""
    query = select(Adapter).where(
        Adapter.digest == digest, Adapter.removed_at.is_(None), Adapter.quarantined_at.is_(None)
    )
    changed = (clock.now(), reason[:LONGEST_REASON])
    return _change(session, clock, query, "adapter.quarantine", changed, "gateway")


def release(session: Session, clock: Clock, digest: str, actor: str) -> list[Adapter]:
    """Let them be used again. Raises NotFound."""
    query = select(Adapter).where(Adapter.digest == digest, Adapter.quarantined_at.is_not(None))
    rows = _change(session, clock, query, "adapter.release", (None, ""), actor)
    if not rows:
        raise NotFound(
            f"No adapter with the digest {digest[:64]!r} is in quarantine.",
            next_step="The page Engines lists those that are.",
        )
    return rows


def _change(
    session: Session,
    clock: Clock,
    query: Select[Adapter],
    action: str,
    values: tuple[datetime | None, str],
    actor: str,
) -> list[Adapter]:
    rows = list(session.scalars(query))
    for row in rows:
        before = describe(row)
        row.quarantined_at, row.quarantine_reason = values
        session.flush()
        scope = scope_of_operator(row.tenant_id, actor)
        audit.record(session, scope, clock, action, row.id, before=before, after=describe(row))
    return rows


def in_quarantine(session: Session) -> list[Adapter]:
    """Of all tenants, latest first."""
    query = select(Adapter).where(Adapter.quarantined_at.is_not(None), Adapter.removed_at.is_(None))
    return list(session.scalars(query.order_by(Adapter.quarantined_at.desc())))


def _quarantined(session: Session, digest: str) -> Adapter | None:
    query = select(Adapter).where(Adapter.digest == digest, Adapter.quarantined_at.is_not(None))
    return session.scalars(query).first()


def get(session: Session, scope: TenantScope, name_or_id: str) -> Adapter:
    row = session.scalars(
        select(Adapter).where(
            Adapter.tenant_id == scope.tenant_id,
            Adapter.removed_at.is_(None),
            (Adapter.name == name_or_id) | (Adapter.id == name_or_id),
        )
    ).first()
    if row is None:
        raise NotFound(
            f"No adapter {name_or_id[:80]!r}.",
            next_step="List the adapters to find its name.",
            param="lora_name",
        )
    return row


def is_registered(session: Session, scope: TenantScope, digest: str) -> bool:
    query = select(Adapter.id).where(
        Adapter.tenant_id == scope.tenant_id,
        Adapter.digest == digest,
        Adapter.removed_at.is_(None),
    )
    return session.scalar(query.limit(1)) is not None


def all_of(session: Session, scope: TenantScope) -> list[Adapter]:
    query = select(Adapter).where(
        Adapter.tenant_id == scope.tenant_id, Adapter.removed_at.is_(None)
    )
    return list(session.scalars(query.order_by(Adapter.name)))


def describe(row: Adapter) -> dict[str, Any]:
    """Public fields; the path of the files is visible to the operator only."""
    plain = ("id", "name", "base_model", "digest", "rank", "bytes", "created_by")
    return {name: getattr(row, name) for name in plain} | {
        "quarantined_at": row.quarantined_at.isoformat() if row.quarantined_at else None,
        "quarantine_reason": row.quarantine_reason or None,
        "created_at": row.created_at.isoformat(),
        "removed_at": row.removed_at.isoformat() if row.removed_at else None,
    }
