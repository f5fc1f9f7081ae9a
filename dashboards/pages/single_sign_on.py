"""Single sign-on: what to paste at the provider, the connection, a test, and force."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest
from core.tenants import sign_on, sign_on_connections
from core.tenants.models import Member, SignOnConnection
from core.tenants.sign_on_connections import NEW_MEMBER_ROLES, ConnectionDraft
from dashboards.formats import day
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    base_of,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    root_of,
    viewer_of,
)
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

PATH = "/single-sign-on"
_PASTE = [Column("name", "Field at the provider"), Column("value", "Value", "code")]
_GUIDES = [
    Column("provider", "Provider"),
    Column("make", "Make the application"),
    Column("issuer", "Issuer to enter here", "code"),
    Column("also", "Also"),
]
_PROVIDERS = [
    {
        "provider": "Okta",
        "make": "Applications › Create App Integration › OIDC › Web Application",
        "issuer": "https://YOUR-ORG.okta.com",
        "also": "Grant type: Authorization Code. Assign the people or groups who may come in.",
    },
    {
        "provider": "Microsoft Entra ID",
        "make": "App registrations › New registration › this directory only",
        "issuer": "https://login.microsoftonline.com/YOUR-TENANT-ID/v2.0",
        "also": "Token configuration › Add optional claim › ID › email. "
        "Certificates & secrets › New client secret: copy its value.",
    },
    {
        "provider": "Google Workspace",
        "make": "Google Cloud console › Credentials › OAuth client ID › Web application",
        "issuer": "https://accounts.google.com",
        "also": "Consent screen: Internal. Accounts outside your Workspace are refused.",
    },
]


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "members"), deps_of(request)
    can_edit = deps.auth.may(viewer, "tenant", "write")
    with deps.database.read() as session:
        row = sign_on_connections.of_tenant(session, viewer.scope.tenant_id)
        domains = [each.domain for each in sign_on.domains(session, viewer.scope)]
        owner = session.get(Member, row.break_glass_id or "") if row is not None else None
    base = base_of(request) + root_of(request)
    paste = [
        {"name": "Redirect URI (callback, reply URL)", "value": f"{base}/sso/callback"},
        {"name": "Sign-in page for your people", "value": _start(base, viewer)},
        {"name": "Scopes", "value": "openid email profile"},
        {"name": "Grant type", "value": "Authorization Code with PKCE"},
    ]
    domain = ", ".join(domains) or "none"
    page_data = PageData(
        "Single sign-on",
        "Members sign in at your own provider, by OpenID Connect, with addresses of your domains.",
        tiles=[
            _state(row),
            Tile(
                "Domains",
                domain,
                "" if domains else "ask the operator to record yours",
                "Whose addresses your provider speaks for. The operator records them.",
                state="" if domains else "warn",
            ),
            Tile("New members", (row.new_member_role if row else None) or "by invitation"),
            Tile("Emergency owner", owner.email if owner is not None else "none"),
        ],
        links=[(_test(viewer), "Test the connection")] if row is not None and can_edit else [],
        tables=[
            Table("1. Paste these at your provider", _PASTE, paste, totals=False),
            Table("2. Where to find things", _GUIDES, _PROVIDERS, totals=False),
        ],
        forms=_forms(row, owner) if can_edit else [],
    )
    return show(request, page_data)


def _start(base: str, viewer: Viewer) -> str:
    return f"{base}/sso/start?tenant={viewer.scope.tenant_id}"


def _test(viewer: Viewer) -> str:
    return f"/sso/start?tenant={viewer.scope.tenant_id}&test=true"


def _state(row: SignOnConnection | None) -> Tile:
    if row is None:
        return Tile("State", "not set")
    if row.tested_at is None:
        return Tile("State", "not tested", row.issuer, state="warn")
    state = "the only way in" if row.forced else "on"
    return Tile("State", state, f"tested {day(row.tested_at)} · {row.issuer}", state="good")


def _forms(row: SignOnConnection | None, owner: Member | None) -> list[Form]:
    roles = [("", "none: members are invited"), *((each, each) for each in NEW_MEMBER_ROLES)]
    secret = "empty: as it is" if row is not None else "empty for a public client"
    inputs = [
        Input("issuer", "Issuer", "url", row.issuer if row is not None else ""),
        Input("client_id", "Client id", value=row.client_id if row is not None else ""),
        Input("client_secret", "Client secret", "password", required=False, hint=secret),
        Input(
            "new_member_role",
            "People who are not members yet become",
            "select",
            (row.new_member_role if row is not None else None) or "",
            roles,
        ),
    ]
    forms = [Form(PATH, "Save", inputs=inputs, title="3. The connection", act="set")]
    if row is None:
        return forms
    if row.forced:
        forms.append(
            Form(
                PATH,
                "Allow passwords again",
                act="free",
                title="The only way in",
                about="Passwords, keys and other issuers do not open the dashboard now.",
            )
        )
    elif row.tested_at is not None:
        email = Input("break_glass", "Emergency owner", "email", owner.email if owner else "")
        forms.append(
            Form(
                PATH,
                "Force single sign-on",
                inputs=[email],
                act="force",
                title="The only way in",
                about="Members then sign in at your provider alone, and other sessions end. The "
                "emergency owner keeps a password for days on which the provider is down. API keys "
                "work on.",
            )
        )
    forms.append(
        Form(PATH, "Remove", act="remove", confirm="remove", danger=True, title="Remove it")
    )
    return forms


def _set(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    given = form_fields.get
    issuer = given("issuer", "")
    deps.backend.check_issuer(issuer)
    with deps.database.transaction() as session:
        draft = ConnectionDraft(
            issuer=issuer,
            client_id=given("client_id", ""),
            client_secret=given("client_secret") or None,
            new_member_role=given("new_member_role") or None,
        )
        sign_on_connections.put(session, viewer.scope, deps.clock, draft)
    return redirect_with_notice(request, PATH, "sign-on-set")


def _force(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    email = form_fields.get("break_glass", "")
    if not email:
        raise BadRequest("Name the emergency owner.", param="break_glass")
    with deps.database.transaction() as session:
        sign_on_connections.force(session, viewer.scope, deps.clock, True, email)
    return redirect_with_notice(request, PATH, "sign-on-forced")


def _free(request: Request, _fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    with deps.database.transaction() as session:
        sign_on_connections.force(session, viewer.scope, deps.clock, False)
    return redirect_with_notice(request, PATH, "sign-on-set")


def _remove(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    require_confirmation(form_fields, "remove")
    with deps.database.transaction() as session:
        sign_on_connections.remove(session, viewer.scope, deps.clock)
    return redirect_with_notice(request, PATH, "sign-on-removed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, set=_set, force=_force, free=_free, remove=_remove),
        methods=["POST"],
    ),
]
