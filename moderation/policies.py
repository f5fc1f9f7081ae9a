"""Active policies: stored as versions, looked up by key, project and tenant, then the default."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, NotFound
from core.tenants import attachments, audit
from core.tenants.scope import TenantScope
from moderation.categories import ENTITY_KINDS, RETIRED_ENTITY_KINDS
from moderation.errors import BadPolicy
from moderation.models import PolicyVersion
from moderation.policy import Policy, default_policy

LEVELS: Final = ("key", "project", "tenant")  # the first level with an active policy applies


def put(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    document: Mapping[str, Any],
    *,
    level: str = "tenant",
    target: str | None = None,
) -> Policy:
    """Validate a document and activate it at once; the active policy of that level is retired."""
    policy = Policy.from_dict(document)
    _check_entity_kinds(policy)
    target_id = _target_id(session, scope, level, target)
    before = _current(session, scope, level, target_id)
    if before is not None and before.version == policy.version:
        return policy
    if before is not None:
        before.retired_at = clock.now()
    session.add(
        PolicyVersion(
            tenant_id=scope.tenant_id,
            level=level,
            target=target_id,
            version=policy.version,
            document=policy.to_dict(),
            created_at=clock.now(),
            created_by=scope.actor,
        )
    )
    session.flush()
    was = None if before is None else {"version": before.version}
    audit.record(
        session,
        scope,
        clock,
        "policy.put",
        target_id,
        before=was,
        after={"version": policy.version},
    )
    return policy


def retire(
    session: Session, scope: TenantScope, clock: Clock, *, level: str, target: str | None = None
) -> None:
    """Deactivate a policy, so that the next level's policy applies."""
    target_id = _target_id(session, scope, level, target)
    row = _current(session, scope, level, target_id)
    if row is None:
        raise NotFound(
            f"No policy is active for {level} {target_id}.", next_step="List the policies."
        )
    row.retired_at = clock.now()
    session.flush()
    audit.record(
        session,
        scope,
        clock,
        "policy.retire",
        target_id,
        before={"version": row.version},
        after=None,
    )


def in_force(session: Session, scope: TenantScope, project_id: str, key_id: str) -> Policy:
    """Return the policy that applies to a key, by the id of the first key of its chain of rotations.
    May be cached until the tenants' epoch changes."""
    targets = {"key": key_id, "project": project_id, "tenant": scope.tenant_id}
    rows = session.scalars(
        select(PolicyVersion)
        .where(
            PolicyVersion.tenant_id == scope.tenant_id,
            PolicyVersion.retired_at.is_(None),
            PolicyVersion.target.in_(targets.values()),
        )
        .order_by(PolicyVersion.id)
    ).all()
    by_level = {row.level: row for row in rows if targets.get(row.level) == row.target}
    for level in LEVELS:
        if level in by_level:
            return Policy.from_dict(by_level[level].document)
    return default_policy()


def history(session: Session, scope: TenantScope, limit: int = 100) -> list[PolicyVersion]:
    """Return the tenant's policy versions, newest first."""
    query = select(PolicyVersion).where(PolicyVersion.tenant_id == scope.tenant_id)
    return list(session.scalars(query.order_by(PolicyVersion.id.desc()).limit(limit)))


def version(session: Session, scope: TenantScope, digest: str) -> Policy:
    """Return a present or former version of the tenant's policies."""
    row = session.scalars(
        select(PolicyVersion)
        .where(PolicyVersion.tenant_id == scope.tenant_id, PolicyVersion.version == digest)
        .limit(1)
    ).first()
    if row is None:
        raise NotFound(f"No policy version {digest}.", next_step="List the policies.")
    return Policy.from_dict(row.document)


def _check_entity_kinds(policy: Policy) -> None:
    for name, screen in (("input", policy.input), ("output", policy.output)):
        for kind in sorted(screen.entities.keys() & set(RETIRED_ENTITY_KINDS)):
            raise BadPolicy(
                f"{name}.entities: nothing detects {kind!r}",
                next_step=f"Use one of: {', '.join(ENTITY_KINDS)}.",
                param=f"{name}.entities.{kind}",
            )


def _target_id(session: Session, scope: TenantScope, level: str, target: str | None) -> str:
    if level not in LEVELS:
        raise BadRequest(f"level is {level!r}: use one of {', '.join(LEVELS)}.", param="level")
    if level == "tenant":
        return scope.tenant_id
    if not target:
        raise BadRequest(f"A {level} policy needs the {level}'s id as target.", param="target")
    return attachments.stored_target(session, scope, level, target)


def _current(session: Session, scope: TenantScope, level: str, target: str) -> PolicyVersion | None:
    return session.scalars(
        select(PolicyVersion)
        .where(
            PolicyVersion.tenant_id == scope.tenant_id,
            PolicyVersion.level == level,
            PolicyVersion.target == target,
            PolicyVersion.retired_at.is_(None),
        )
        .order_by(PolicyVersion.id.desc())
        .limit(1)
    ).first()
