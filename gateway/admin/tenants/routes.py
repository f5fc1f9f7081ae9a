"""/admin/v1/tenants, /tenant and /projects."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from billing.adjustments import onboarding
from billing.notices import request_sinks as sinks
from billing.notices.request_sinks import Sink, SinkOptions
from core.tenants import members, organisations
from core.tenants.response_cache import ERASED, SETTING
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import (
    CacheRuleBody,
    LabelKeys,
    NewProject,
    NewTenant,
    RequestLogBody,
    TenantChange,
)
from gateway.serving.api.dependencies import AlertTargetsDep

router = APIRouter(prefix="/admin/v1", tags=["tenants"])


@router.get("/tenants")
def list_tenants(
    ctx: Annotated[OperatorContext, Depends(RequireOperator("tenants", "read"))],
) -> dict[str, Any]:
    with ctx.database.read() as session:
        listed = [organisations.describe(each) for each in organisations.all_tenants(session)]
    return {"object": "list", "data": listed}


@router.post("/tenants", status_code=201)
def create_tenant(
    body: NewTenant,
    ctx: Annotated[OperatorContext, Depends(RequireOperator("tenants", "write"))],
) -> dict[str, Any]:
    """Create a tenant with its billing account and first project; with `owner` and `key` its first
    member and key too. The key's secret is in this answer only."""
    hashed = None
    if body.owner is not None and body.owner.password:
        hashed = members.hash_for(ctx.database, body.owner.email, body.owner.password)
    with ctx.database.transaction() as session:
        made = onboarding.onboard(session, ctx.clock, body.customer(hashed), ctx.actor.id)
        return made.describe()


@router.get("/tenant")
def get_tenant(
    ctx: Annotated[AdminContext, Depends(RequirePermission("tenant", "read"))],
) -> dict[str, Any]:
    with ctx.database.read() as session:
        return organisations.describe(organisations.get_tenant(session, ctx.scope))


@router.patch("/tenant")
def change_tenant(
    body: TenantChange, ctx: Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        changed = organisations.change_tenant(
            session, ctx.scope, ctx.clock, **body.model_dump(exclude_unset=True)
        )
        return organisations.describe(changed)


@router.get("/projects")
def list_projects(
    ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "read"))],
) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = organisations.projects(session, ctx.scope)
        return {"object": "list", "data": [organisations.describe_project(each) for each in rows]}


@router.post("/projects", status_code=201)
def create_project(
    body: NewProject, ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "write"))]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        created = organisations.create_project(session, ctx.scope, ctx.clock, name=body.name)
        return organisations.describe_project(created)


@router.put("/projects/{project_id}/labels")
def set_labels(
    project_id: str,
    body: LabelKeys,
    ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "write"))],
) -> dict[str, Any]:
    """The names that `metadata` and the header x-tollhouse-labels may have, by which usage is
    counted. A change reaches every gateway within a second."""
    with ctx.database.transaction() as session:
        changed = organisations.set_label_keys(
            session, ctx.scope, ctx.clock, project_id, body.label_keys
        )
        return organisations.describe_project(changed)


@router.delete("/projects/{project_id}")
def archive_project(
    project_id: str, ctx: Annotated[AdminContext, Depends(RequirePermission("projects", "write"))]
) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        archived = organisations.archive_project(session, ctx.scope, ctx.clock, project_id)
        return organisations.describe_project(archived)


request_log_router = APIRouter(prefix="/admin/v1/request-log", tags=["tenants"])
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("tenant", "write"))]


@request_log_router.get("")
def get_receiver(ctx: ReadAccess) -> dict[str, Any]:
    """`url` is null while requests are not logged."""
    with ctx.database.read() as session:
        return _receiver_shown(sinks.sink_of(session, ctx.scope))


@request_log_router.put("")
def set_receiver(
    body: RequestLogBody, ctx: WriteAccess, targets: AlertTargetsDep
) -> dict[str, Any]:
    """Log every request from now on. The signing secret is in this answer only. The operator may name
    a bucket (`s3://bucket/prefix`) instead of a webhook."""
    if not (sinks.is_bucket(body.url) and ctx.actor.is_operator):
        targets.check([body.url])
    options = SinkOptions(body.content, body.format, body.sample_percent, body.authorization)
    with ctx.database.transaction() as session:
        sink = sinks.set_sink(session, ctx.scope, ctx.clock, body.url, options)
    return _receiver_shown(sink) | {"secret": None if sink.is_bucket else sink.secret}


@request_log_router.delete("")
def remove_receiver(ctx: WriteAccess) -> dict[str, Any]:
    """Log no more requests; records that wait are dropped."""
    with ctx.database.transaction() as session:
        sinks.remove_sink(session, ctx.scope, ctx.clock)
    return _receiver_shown(None)


def _receiver_shown(sink: Sink | None) -> dict[str, Any]:
    return {
        "object": "request_log",
        "url": sink.url if sink is not None else None,
        "content": sink.content if sink is not None else False,
        "format": sink.format if sink is not None else None,
        "sample_percent": sink.sample_percent if sink is not None else None,
        "since": sink.since.isoformat() if sink is not None else None,
    }


response_cache_router = APIRouter(prefix="/admin/v1/response-cache", tags=["tenants"])


@response_cache_router.get("")
def get_rule(ctx: ReadAccess) -> dict[str, Any]:
    """`rule` is null where only requests that ask for it are cached."""
    with ctx.database.read() as session:
        return _rule_shown(organisations.get_tenant(session, ctx.scope).settings)


@response_cache_router.put("")
def set_rule(body: CacheRuleBody, ctx: WriteAccess) -> dict[str, Any]:
    """Cache the answers of every request that the rule admits."""
    with ctx.database.transaction() as session:
        settings = {SETTING: body.model_dump()}
        changed = organisations.change_tenant(session, ctx.scope, ctx.clock, settings=settings)
        return _rule_shown(changed.settings)


@response_cache_router.delete("")
def remove_rule(ctx: WriteAccess) -> dict[str, Any]:
    """Remove the rule and erase the cached answers."""
    with ctx.database.transaction() as session:
        organisations.change_tenant(session, ctx.scope, ctx.clock, settings={SETTING: None})
        organisations.erase_cached_responses(session, ctx.scope, ctx.clock)
        return _rule_shown(organisations.get_tenant(session, ctx.scope).settings)


@response_cache_router.post("/erase")
def erase_answers(ctx: WriteAccess) -> dict[str, Any]:
    """Erase the cached answers and keep the rule."""
    with ctx.database.transaction() as session:
        organisations.erase_cached_responses(session, ctx.scope, ctx.clock)
        return _rule_shown(organisations.get_tenant(session, ctx.scope).settings)


def _rule_shown(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": "response_cache",
        "rule": settings.get(SETTING),
        "erased_at": settings.get(ERASED),
    }
