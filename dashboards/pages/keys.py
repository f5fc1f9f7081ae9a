"""API keys: create (shown once), change, rotate and revoke. Revoking requires the key's name."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest
from core.tenants import key_changes, key_routing, key_scopes, keys, organisations
from core.tenants.key_changes import KeyChange
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import ApiKey, Member, Project
from core.tenants.scope import TenantScope
from dashboards.formats import day, moment
from dashboards.once import redirect_with_secret
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    root_of,
    viewer_of,
    wants_csv,
)
from dashboards.pages.playground import of_ended_page
from dashboards.tables import Column, Table

PATH = "/keys"
OVERLAP = timedelta(hours=24)
COLUMNS = [
    Column("name", "Name", link="href"),
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
    now, root = deps.clock.now(), root_of(request)
    with deps.database.read() as session:
        projects = organisations.projects(session, viewer.scope)
        names = {each.id: each.name for each in projects}
        rows = [
            _row(key, names, now, can_edit) | {"href": f"{root}{PATH}/{key.id}"}
            for key in keys.all_of(session, viewer.scope)
            if not of_ended_page(key, now)
        ]
    columns = [*COLUMNS, Column("acts", "Change", "acts")] if can_edit else COLUMNS
    empty = (
        "No keys yet. A key works with any OpenAI or Anthropic SDK. "
        "By command: `tollhouse key new --name laptop`."
    )
    step = ("#new-key", "Create key") if can_edit else None
    table = Table(
        "Keys of this organisation", columns, rows, totals=False, empty=empty, next_step=step
    )
    if wants_csv(request):
        return table.csv("keys")
    page_data = PageData(
        "Keys",
        "A key is shown once, when it is created. Only its hash is stored.",
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
    owners = [("", "you: it stops when you leave"), (_SERVICE, "a service account")]
    inputs = [
        Input("name", "Name"),
        Input("project_id", "Project", "select", options=open_projects),
        Input("role", "Role", "select", "developer", roles),
        Input("owner", "Belongs to", "select", options=owners),
        *_bound_inputs(served),
    ]
    return Form(PATH, "Create key", {"act": "create"}, inputs, title="New key", panel=True)


_SERVICE = "service"


def _bound_inputs(served: Sequence[str], key: ApiKey | None = None) -> list[Input]:
    """What a key may use, from where and until when, with the values of `key`."""
    scopes = key.scopes if key is not None else {}
    routing = (key.routing if key is not None else None) or {}
    ends = key.expires_at if key is not None else None
    return [
        Input(
            "models",
            "Only these models",
            value=", ".join(scopes.get("models", ())),
            required=False,
            hint=f"Any of {', '.join(served)}, separated by commas. "
            "Leave empty to allow all models, including later ones.",
        ),
        Input(
            "expires_at",
            "Ends on",
            "date",
            value=f"{ends:%Y-%m-%d}" if ends else "",
            required=False,
            hint="At 00:00 UTC. Empty: never.",
        ),
        Input(
            "adapters",
            "Only these adapters",
            value=", ".join(scopes.get("adapters", ())),
            required=False,
            advanced=True,
        ),
        Input(
            "routes",
            "Only these routes",
            value=", ".join(scopes.get("routes", ())),
            required=False,
            hint="Such as /v1/chat/completions or /v1/*.",
            advanced=True,
        ),
        Input(
            "allowed_ips",
            "Only from these addresses",
            value=", ".join(key.allowed_ips) if key is not None else "",
            required=False,
            hint="Such as 203.0.113.7 or 203.0.113.0/24.",
            advanced=True,
        ),
        Input(
            "fallback",
            "Fallback chains",
            value=key_routing.chains_text(routing),
            required=False,
            hint="Such as small=large,other; off for none; empty for the organisation's.",
            advanced=True,
        ),
        Input(
            "canary",
            "Canaries",
            value=key_routing.shares_text(routing),
            required=False,
            hint="Percent of a model's conversations for others, such as small=large:5.",
            advanced=True,
        ),
    ]


def _bounds(request: Request, form_fields: Fields, scope: TenantScope) -> KeyChange:
    """What the form says, checked; its empty fields remove what was there."""
    given = form_fields.get
    scopes = {name: _names(given(name, "")) or None for name in key_scopes.NAMES}
    routing = {
        key_routing.FALLBACK: key_routing.parse_chains(given("fallback", "")),
        key_routing.CANARY: key_routing.parse_shares(given("canary", "")),
    }
    deps_of(request).backend.check_key(scope, scopes, routing)
    ends = _day(given("expires_at", ""))
    return KeyChange(
        scopes=scopes,
        routing=routing,
        allowed_ips=_names(given("allowed_ips", "")),
        expires_at=ends,
        no_end=ends is None,
    )


def _names(text: str) -> list[str]:
    return sorted({each.strip() for each in text.split(",") if each.strip()})


def _day(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) if text else None
    except ValueError:
        raise BadRequest(
            f"The end is {text[:40]!r}, which is not a day.",
            next_step="Write it as 2027-01-31, or leave it empty.",
            param="expires_at",
        ) from None


def key_page(request: Request) -> Response:
    viewer, deps = viewer_of(request, "keys"), deps_of(request)
    can_edit = deps.auth.may(viewer, "keys", "write")
    now = deps.clock.now()
    with deps.database.read() as session:
        key = keys.get(session, viewer.scope, request.path_params["key_id"])
        names = {each.id: each.name for each in organisations.projects(session, viewer.scope)}
        owner = session.get(Member, key.member_id) if key.member_id else None
    row = _row(key, names, now, False)
    path = f"{PATH}/{key.id}"
    served = deps.backend.base_models()
    forms = []
    if can_edit and keys.is_live(key, now):
        inputs = [Input("name", "Name", value=key.name), *_bound_inputs(served, key)]
        about = "A change is in force within a second. The project and the role of a key stay."
        forms = [Form(path, "Save", inputs=inputs, title="Change", about=about, act="change")]
        forms += [replace(each, path=path) for each in _acts(key, str(row["state"]))]
    page_data = PageData(
        f"{key.name} …{key.last_four}",
        f"A key of {names.get(key.project_id, key.project_id)} with the role {key.role}.",
        tiles=[
            Tile("State", str(row["state"]), state=_STATES.get(str(row["state"]), "")),
            Tile("Works until", day(row["until"]) if row["until"] else "no end"),
            Tile("Last used", moment(key.last_used_at)),
            Tile("Belongs to", owner.email if owner is not None else "a service account"),
        ],
        forms=forms,
        back=(PATH, "All keys"),
        link=(f"/requests?q={quote(f'key:{key.name}')}", "Its requests"),
    )
    return show(request, page_data)


_STATES = {"active": "good", "ending": "warn", "revoked": "bad", "expired": "bad"}


def _change(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    key_id = request.path_params["key_id"]
    bounds = _bounds(request, form_fields, viewer.scope)
    with deps.database.transaction() as session:
        key = keys.get(session, viewer.scope, key_id)
        shown = {each.name: each.value for each in _bound_inputs((), key)}
        kept = {name for name, value in shown.items() if form_fields.get(name, "") == value}
        # A field that nobody touched says less than the key has: an hour, or a list of nothing.
        changed = KeyChange(
            name=form_fields.get("name", ""),
            scopes=_without(bounds.scopes, kept),
            routing=_without(bounds.routing, kept),
            allowed_ips=None if "allowed_ips" in kept else bounds.allowed_ips,
            expires_at=None if "expires_at" in kept else bounds.expires_at,
            no_end=bounds.no_end and "expires_at" not in kept,
        )
        key_changes.change(session, viewer.scope, deps.clock, key_id, changed)
    return redirect_with_notice(request, f"{PATH}/{key_id}", "key-changed")


def _without(given: dict[str, Any] | None, kept: set[str]) -> dict[str, Any] | None:
    return {name: each for name, each in (given or {}).items() if name not in kept} or None


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "keys", "write"), deps_of(request)
    name = keys.check_name(form_fields.get("name", ""))
    bounds = _bounds(request, form_fields, viewer.scope)
    scopes = {name: frozenset(each) for name, each in (bounds.scopes or {}).items() if each}
    with deps.database.transaction() as session:
        issued = keys.issue(
            session,
            viewer.scope,
            deps.clock,
            project_id=form_fields.get("project_id", ""),
            name=name,
            role=form_fields.get("role", "developer"),
            scopes=KeyScopes(**scopes),
            allowed_ips=tuple(bounds.allowed_ips or ()),
            expires_at=bounds.expires_at,
            routing={each: rule for each, rule in (bounds.routing or {}).items() if rule},
            service_account=form_fields.get("owner") == _SERVICE,
        )
    return redirect_with_secret(request, PATH, "key-made", issued.secret)


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
    Route(f"{PATH}/{{key_id}}", key_page, methods=["GET"]),
    Route(
        f"{PATH}/{{key_id}}",
        form_handler(key_page, change=_change, rotate=_rotate, revoke=_revoke),
        methods=["POST"],
    ),
]
