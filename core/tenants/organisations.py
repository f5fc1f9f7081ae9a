"""Organisations (tenants) and their projects: create, change, suspend, close. Changes are audited."""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import labels
from core.clock import Clock
from core.errors import BadRequest, Conflict, Forbidden, NotFound
from core.ids import PROJECT, TENANT, new_id
from core.money import MINOR_DIGITS
from core.tenants import audit, key_routing, plan_store, response_cache
from core.tenants.keys import UNPAID
from core.tenants.models import Project, Tenant
from core.tenants.roles import OPERATOR, ensure_policy
from core.tenants.scope import TenantScope, scope_of_operator

STATUSES = (
    "active",
    "suspended",
    "closed",
)  # that the operator can set; dunning also sets `unpaid`
_MOST_ALIKE = 5  # that an error names
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def create_tenant(
    session: Session,
    clock: Clock,
    *,
    name: str,
    display_name: str = "",
    plan: str = "standard",
    currency: str = "USD",
    timezone: str = "UTC",
    actor: str = "operator",
) -> Tenant:
    """Called by the operator's routes and commands only."""
    check_slug(name)
    plan_store.find(session, plan)
    if currency not in MINOR_DIGITS:
        raise BadRequest(
            f"Unknown currency {currency!r}.",
            next_step=f"Use one of {', '.join(MINOR_DIGITS)}.",
            param="currency",
        )
    if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
        raise Conflict(f"A tenant named {name} already exists.", next_step="Choose another name.")
    tenant = Tenant(
        id=new_id(TENANT),
        name=name,
        display_name=display_name or name,
        plan=plan,
        currency=currency,
        timezone=timezone,
        status="active",
        settings={},
        created_at=clock.now(),
    )
    session.add(tenant)
    session.flush()
    ensure_policy(session)
    scope = scope_of_operator(tenant.id, actor)
    audit.record(
        session, scope, clock, "tenant.create", tenant.id, before=None, after=describe(tenant)
    )
    return tenant


def get_tenant(session: Session, scope: TenantScope) -> Tenant:
    tenant = session.get(Tenant, scope.tenant_id)
    if tenant is None:
        raise NotFound(f"No tenant {scope.tenant_id}.", next_step="List the tenants.")
    return tenant


def tenant_named(session: Session, name_or_id: str) -> Tenant:
    """For the operator's commands and routes only. NotFound if there is none."""
    found = _exactly(session, name_or_id)
    if found is None:
        raise NotFound(f"No tenant {name_or_id}.", next_step="Run `tollhouse tenant list`.")
    return found


def tenant_like(session: Session, words: str) -> Tenant:
    """For the operator's pages: the tenant of that name or id, or the only one whose name or display
    name contains the words in any case. NotFound names those between which to choose."""
    if (named := _exactly(session, words)) is not None:
        return named
    part = words.strip()
    alike = Tenant.name.icontains(part, autoescape=True)
    alike |= Tenant.display_name.icontains(part, autoescape=True)
    query = select(Tenant).where(alike).order_by(Tenant.name).limit(_MOST_ALIKE + 1)
    found = session.scalars(query).all() if part else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"No tenant is named like {words!r}.", next_step="Look at the list.")
    names = ", ".join(each.name for each in found[:_MOST_ALIKE])
    more = " and others" if len(found) > _MOST_ALIKE else ""
    raise NotFound(
        f"Several tenants are named like {words!r}: {names}{more}.", next_step="Name one."
    )


def _exactly(session: Session, name_or_id: str) -> Tenant | None:
    query = select(Tenant).where((Tenant.name == name_or_id) | (Tenant.id == name_or_id))
    return session.scalars(query).one_or_none()


def change_tenant(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    *,
    display_name: str | None = None,
    settings: dict[str, Any] | None = None,
    plan: str | None = None,
    status: str | None = None,
) -> Tenant:
    """Only the operator may change plan and status. `settings` is merged; null removes a name."""
    tenant = get_tenant(session, scope)
    before = describe(tenant)
    if (plan is not None or status is not None) and scope.role != OPERATOR:
        raise Forbidden(
            "Only the operator may change the plan and the status.", next_step="Ask the operator."
        )
    if display_name is not None:
        tenant.display_name = display_name[:200]
    if settings is not None:
        response_cache.check(settings)
        key_routing.check(settings, "settings")
        merged = {**tenant.settings, **settings}
        tenant.settings = {name: value for name, value in merged.items() if value is not None}
    if plan is not None:
        tenant.plan = plan_store.find(session, plan).name
    if status is not None:
        if status not in STATUSES:
            raise BadRequest(
                f"Unknown status {status!r}; use one of {', '.join(STATUSES)}.", param="status"
            )
        tenant.status = status
    session.flush()
    audit.record(
        session, scope, clock, "tenant.change", tenant.id, before=before, after=describe(tenant)
    )
    return tenant


def erase_cached_responses(session: Session, scope: TenantScope, clock: Clock) -> datetime:
    """Answers cached before are no longer served, and leave the gateways' memory within seconds."""
    now = clock.now()
    change_tenant(session, scope, clock, settings={response_cache.ERASED: now.isoformat()})
    return now


def set_unpaid(session: Session, clock: Clock, tenant_id: str, unpaid: bool) -> bool:
    """Switch a tenant between `active` and `unpaid`. Returns whether the status changed; suspended
    and closed tenants stay as they are.
    """
    before, after = ("active", UNPAID) if unpaid else (UNPAID, "active")
    tenant = session.get(Tenant, tenant_id)
    if tenant is None or tenant.status != before:
        return False
    shown = describe(tenant)
    tenant.status = after
    session.flush()
    scope = scope_of_operator(tenant.id, "dunning")
    action = "tenant.suspend" if unpaid else "tenant.reinstate"
    audit.record(session, scope, clock, action, tenant.id, before=shown, after=describe(tenant))
    return True


def all_tenants(session: Session) -> list[Tenant]:
    """For the operator only."""
    return list(session.scalars(select(Tenant).order_by(Tenant.name)))


def get_project(session: Session, scope: TenantScope, project_id: str) -> Project:
    project = session.get(Project, project_id)
    if project is None or project.tenant_id != scope.tenant_id:
        raise NotFound(f"No project {project_id}.", next_step="List the projects.")
    return project


def archive_project(session: Session, scope: TenantScope, clock: Clock, project_id: str) -> Project:
    """Archive a project; its keys stop working."""
    project = get_project(session, scope, project_id)
    before = describe_project(project)
    if project.archived_at is None:
        project.archived_at = clock.now()
        session.flush()
        after = describe_project(project)
        audit.record(
            session, scope, clock, "project.archive", project.id, before=before, after=after
        )
    return project


def set_label_keys(
    session: Session, scope: TenantScope, clock: Clock, project_id: str, keys: Iterable[str]
) -> Project:
    """The labels that requests of the project may carry from now on."""
    project = get_project(session, scope, project_id)
    before, project.label_keys = describe_project(project), labels.check_keys(keys)
    session.flush()
    after = describe_project(project)
    audit.record(session, scope, clock, "project.labels", project.id, before=before, after=after)
    return project


def rename_project(
    session: Session, scope: TenantScope, clock: Clock, project_id: str, name: str
) -> Project:
    """What is attached to the project stays: it is attached by id."""
    project = get_project(session, scope, project_id)
    if project.name != check_slug(name):
        _check_free(session, scope, name)
        before, project.name = describe_project(project), name
        session.flush()
        after = describe_project(project)
        audit.record(
            session, scope, clock, "project.rename", project.id, before=before, after=after
        )
    return project


def create_project(session: Session, scope: TenantScope, clock: Clock, *, name: str) -> Project:
    check_slug(name)
    _check_free(session, scope, name)
    project = Project(
        id=new_id(PROJECT), tenant_id=scope.tenant_id, name=name, created_at=clock.now()
    )
    session.add(project)
    session.flush()
    audit.record(
        session,
        scope,
        clock,
        "project.create",
        project.id,
        before=None,
        after=describe_project(project),
    )
    return project


def _check_free(session: Session, scope: TenantScope, name: str) -> None:
    existing = select(Project.id).where(Project.tenant_id == scope.tenant_id, Project.name == name)
    if session.scalar(existing) is not None:
        raise Conflict(f"A project named {name} already exists.", next_step="Choose another name.")


def projects(session: Session, scope: TenantScope) -> list[Project]:
    query = select(Project).where(Project.tenant_id == scope.tenant_id)
    if scope.project_id is not None:
        query = query.where(Project.id == scope.project_id)
    return list(session.scalars(query.order_by(Project.id)))


def describe(tenant: Tenant) -> dict[str, Any]:
    plain = ("id", "name", "display_name", "plan", "status", "currency", "timezone", "settings")
    return {name: getattr(tenant, name) for name in plain} | {
        "created_at": tenant.created_at.isoformat()
    }


def describe_project(project: Project) -> dict[str, Any]:
    return {
        "id": project.id,
        "name": project.name,
        "created_at": project.created_at.isoformat(),
        "archived_at": project.archived_at.isoformat() if project.archived_at else None,
        "label_keys": project.label_keys or [],
    }


def check_slug(name: str) -> str:
    if not _SLUG.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a valid name.",
            next_step="Use 1 to 63 lower-case letters, digits and hyphens.",
            param="name",
        )
    return name
