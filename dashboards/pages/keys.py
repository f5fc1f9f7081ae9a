"""API keys: create (shown once), rotate and revoke. Revoking requires the key's name."""

from datetime import timedelta
from typing import Any

from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from core.errors import BadRequest
from core.tenants import keys
from core.tenants.models import Project
from dashboards.pages.common import deps_of, viewer_of
from dashboards.render import page

OVERLAP = timedelta(hours=24)


def show(request: Request, secret: str = "") -> Response:
    viewer, deps = viewer_of(request, "keys"), deps_of(request)
    now = deps.clock.now()
    with deps.database.read() as session:
        rows = [_row(key, now) for key in keys.all_of(session, viewer.scope)]
        projects = session.scalars(
            select(Project)
            .where(Project.tenant_id == viewer.scope.tenant_id, Project.archived_at.is_(None))
            .order_by(Project.name)
        ).all()
    return page(
        request,
        "keys.html",
        rows=rows,
        projects=projects,
        secret=secret,
        roles=keys.KEY_ROLES,
        can_edit=deps.auth.may(viewer, "keys", "write"),
    )


async def change(request: Request) -> Response:
    """The POST handler, dispatched by the form's field `act`."""
    async with request.form(max_fields=10, max_part_size=10_000) as fields:
        form_fields = {name: str(value).strip() for name, value in fields.items()}
    act = form_fields.get("act", "")
    if act not in _ACTS:
        raise BadRequest(f"Unknown act {act[:20]!r}.", next_step=f"Send one of {', '.join(_ACTS)}.")
    secret = await run_in_threadpool(_ACTS[act], request, form_fields)
    if secret is not None:
        return await run_in_threadpool(show, request, secret)
    root = request.scope.get("root_path", "")
    return RedirectResponse(f"{root}/keys?notice=key-revoked", 303)


def _create(request: Request, form_fields: dict[str, str]) -> str | None:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    name = form_fields.get("name", "")
    if not 0 < len(name) <= 120:
        raise BadRequest(
            f"The name has {len(name)} characters.",
            next_step="Give the key a name of 1 to 120 characters.",
            param="name",
        )
    with deps.database.transaction() as session:
        issued = keys.issue(
            session,
            viewer.scope,
            deps.clock,
            project_id=form_fields.get("project_id", ""),
            name=name,
            role=form_fields.get("role", "developer"),
        )
    return issued.secret


def _rotate(request: Request, form_fields: dict[str, str]) -> str | None:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    with deps.database.transaction() as session:
        return keys.rotate(
            session, viewer.scope, deps.clock, form_fields.get("key_id", ""), overlap=OVERLAP
        ).secret


def _revoke(request: Request, form_fields: dict[str, str]) -> str | None:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    with deps.database.transaction() as session:
        key = keys.get(session, viewer.scope, form_fields.get("key_id", ""))
        if form_fields.get("confirm") != key.name:
            raise BadRequest(
                "The confirmation does not match the name of the key.",
                next_step=f"Type {key.name!r} to revoke it.",
            )
        keys.revoke(session, viewer.scope, deps.clock, key.id)
    return None


_ACTS: dict[str, Any] = {"create": _create, "rotate": _rotate, "revoke": _revoke}


def _row(key: Any, now: Any) -> dict[str, Any]:
    over = key.revoked_at is not None and key.revoked_at <= now
    expired = key.expires_at is not None and key.expires_at <= now
    state = (
        "revoked" if over else "expired" if expired else "ending" if key.revoked_at else "active"
    )
    return {"key": key, "state": state, "open": state == "active"}


ROUTES = [Route("/keys", show, methods=["GET"]), Route("/keys", change, methods=["POST"])]
