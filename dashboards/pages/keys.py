"""API keys: create (shown once), rotate and revoke. Revoking requires the key's name."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest
from core.tenants import key_routing, keys, organisations
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import ApiKey, Project
from dashboards.once import redirect_with_secret
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.pages.playground import of_ended_page
from dashboards.tables import Column, Table

PATH = "/keys"
OVERLAP = timedelta(hours=24)
COLUMNS = [
    Column("name", "Name"),
    Column("ends", "Ends in", "code"),
    Column("project", "Project"),
    Column("role", "Role"),
    Column("models", "Models"),
    Column("routing", "Routing", about="Fallback chains and canaries of the key itself."),
    Column("state", "State", "badge"),
    Column("until", "Works until", "moment"),
    Column("created", "Created", "moment"),
    Column("used", "Last used", "moment"),
]


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "keys"), deps_of(request)
    can_edit = deps.auth.may(viewer, "keys", "write")
    now = deps.clock.now()
    with deps.database.read() as session:
        projects = organisations.projects(session, viewer.scope)
        names = {each.id: each.name for each in projects}
        rows = [
            _row(key, names, now, can_edit)
            for key in keys.all_of(session, viewer.scope)
            if not of_ended_page(key, now)
        ]
    columns = [*COLUMNS, Column("acts", "Change", "acts")] if can_edit else COLUMNS
    empty = "No keys yet. Create one below; it works with any OpenAI or Anthropic SDK."
    table = Table("Keys of this organisation", columns, rows, totals=False, empty=empty)
    if wants_csv(request):
        return table.csv("keys")
    page_data = PageData(
        "Keys",
        "A key is shown once, when it is created. Only its hash is stored.",
        links=[(f"{PATH}#new-key", "Create key")] if can_edit else [],
        tables=[table],
        forms=[_new(projects, deps.backend.base_models())] if can_edit else [],
    )
    return show(request, page_data)


def _row(key: ApiKey, projects: dict[str, str], now: datetime, can_edit: bool) -> dict[str, Any]:
    over = key.revoked_at is not None and key.revoked_at <= now
    expired = key.expires_at is not None and key.expires_at <= now
    state = (
        "revoked" if over else "expired" if expired else "ending" if key.revoked_at else "active"
    )
    return {
        "name": key.name,
        "ends": f"…{key.last_four}",
        "project": projects.get(key.project_id, key.project_id),
        "role": key.role,
        "models": keys.models_of(key),
        "routing": key_routing.written(key.routing or {}),
        "state": state,
        "until": min((at for at in (key.expires_at, key.revoked_at) if at), default=None),
        "created": key.created_at,
        "used": key.last_used_at,
        "acts": _acts(key, state) if can_edit else [],
    }


def _acts(key: ApiKey, state: str) -> list[Form]:
    same = {"key_id": key.id}
    about = (
        "Creates a new key with the same rights, budgets, limits and policy. "
        "This one continues to work for 24 hours."
    )
    rotate = Form(PATH, "Rotate", {"act": "rotate", **same}, about=about)
    revoke = Form(PATH, "Revoke", {"act": "revoke", **same}, confirm=key.name, danger=True)
    return {"active": [rotate, revoke], "ending": [revoke]}.get(state, [])


def _new(projects: list[Project], served: Sequence[str]) -> Form:
    open_projects = [(each.id, each.name) for each in projects if each.archived_at is None]
    roles = [(role, role) for role in keys.KEY_ROLES]
    inputs = [
        Input("name", "Name"),
        Input("project_id", "Project", "select", options=open_projects),
        Input("role", "Role", "select", "developer", roles),
        Input(
            "models",
            "Only these models",
            required=False,
            hint=f"Any of {', '.join(served)}, separated by commas. "
            "Leave empty to allow all models, including later ones.",
        ),
        Input(
            "fallback",
            "Fallback chains",
            required=False,
            hint="Such as small=large,other; off for none; empty for the organisation's.",
        ),
        Input(
            "canary",
            "Canaries",
            required=False,
            hint="Percent of a model's conversations for others, such as small=large:5.",
        ),
    ]
    return Form(PATH, "Create key", {"act": "create"}, inputs, title="New key")


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    name = form_fields.get("name", "")
    if not 0 < len(name) <= 120:
        raise BadRequest(
            f"The name has {len(name)} characters.",
            next_step="Give the key a name of 1 to 120 characters.",
            param="name",
        )
    allowed = _models(form_fields.get("models", ""), deps.backend.base_models())
    routing = {
        key_routing.FALLBACK: key_routing.parse_chains(form_fields.get("fallback", "")),
        key_routing.CANARY: key_routing.parse_shares(form_fields.get("canary", "")),
    }
    with deps.database.transaction() as session:
        issued = keys.issue(
            session,
            viewer.scope,
            deps.clock,
            project_id=form_fields.get("project_id", ""),
            name=name,
            role=form_fields.get("role", "developer"),
            scopes=KeyScopes(models=allowed),
            routing={name: each for name, each in routing.items() if each is not None},
        )
    return redirect_with_secret(request, PATH, "key-made", issued.secret)


def _models(text: str, served: Sequence[str]) -> frozenset[str] | None:
    """None for all models. A misspelt name would make a key that can use nothing."""
    names = frozenset(each.strip() for each in text.split(",") if each.strip())
    for name in sorted(names - set(served)):
        raise BadRequest(
            f"There is no model {name[:200]!r}.",
            next_step=f"Use names of {', '.join(served)}, separated by commas.",
            param="models",
        )
    return names or None


def _rotate(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    with deps.database.transaction() as session:
        key_id = form_fields.get("key_id", "")
        issued = keys.rotate(session, viewer.scope, deps.clock, key_id, overlap=OVERLAP)
    return redirect_with_secret(request, PATH, "key-rotated", issued.secret)


def _revoke(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    with deps.database.transaction() as session:
        key = keys.get(session, viewer.scope, form_fields.get("key_id", ""))
        require_confirmation(form_fields, key.name)
        keys.revoke(session, viewer.scope, deps.clock, key.id)
    return redirect_with_notice(request, PATH, "key-revoked")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, create=_create, rotate=_rotate, revoke=_revoke),
        methods=["POST"],
    ),
]
