"""Team: members and their roles, and the audit log."""

from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.notices import member_mails
from core.tenants import audit, audit_words, invitations, members
from core.tenants.models import AuditEntry, Member
from core.tenants.roles import MEMBER_ROLES, may_grant
from dashboards.entity_names import names_of
from dashboards.once import redirect_with_secret
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    base_of,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

PATH = "/team"
MEMBERS = [
    Column("email", "E-mail"),
    Column("name", "Name"),
    Column("role", "Role"),
    Column("comes", "Signs in with"),
    Column("state", "State", "badge"),
    Column("seen", "Last seen", "moment"),
]
CHANGES = [
    Column("at", "When", "moment"),
    Column("actor", "Actor"),
    Column("action", "Action"),
    Column("target", "Target"),
    Column("change", "Change"),
]
_LONGEST = 160  # characters of what changed
_TARGET_ID = Column("target_id", "Target id", "code")  # of the file; the page has the name


def team(request: Request) -> Response:
    viewer, deps = viewer_of(request, "members"), deps_of(request)
    can_edit = deps.auth.may(viewer, "members", "write")
    with deps.database.read() as session:
        found = members.all_of(session, viewer.scope)
        log = audit.entries(session, viewer.scope)
        names = names_of(session, viewer.scope, _ids_in(log))
    rows = [_row(each, viewer.role if can_edit else "") for each in found]
    columns = [*MEMBERS, Column("acts", "Change", "acts")] if can_edit else MEMBERS
    empty = "No members yet. A member signs in with a password or by single sign-on."
    step = ("#new-member", "Add a member") if can_edit else None
    table = Table("Members", columns, rows, totals=False, empty=empty, next_step=step)
    changes = [_change_row(each, names) for each in log]
    changed = Table("Latest changes", CHANGES, changes, totals=False, empty="No changes yet.")
    if wants_csv(request):
        return replace(changed, columns=[*CHANGES, _TARGET_ID]).csv("changes")
    page_data = PageData(
        "Team",
        "Owners can do everything; admins manage projects, keys and members; finance manages costs and "
        "payments; developers manage adapters; viewers read pages. The keys of every role run requests.",
        tables=[table],
        forms=[_new(viewer.role)] if can_edit else [],
        after=[changed],
    )
    return show(request, page_data)


def _row(member: Member, my_role: str) -> dict[str, Any]:
    methods = [way for way, has in _sign_in_methods(member) if has]
    may_change = bool(my_role) and may_grant(my_role, member.role)
    return {
        "email": member.email,
        "name": member.name,
        "role": member.role,
        "comes": " and ".join(methods) or _pending(member),
        "state": members.state_of(member),
        "seen": member.last_seen_at,
        "acts": _acts(member, my_role) if may_change else [],
    }


def _sign_in_methods(member: Member) -> list[tuple[str, bool]]:
    return [
        ("password", member.password_hash is not None),
        ("single sign-on", member.oidc_subject is not None),
    ]


def _pending(member: Member) -> str:
    ends = member.invitation_expires_at
    return f"a link, until {ends:%Y-%m-%d %H:%M} UTC" if ends else "nothing yet: send a link"


def _acts(member: Member, my_role: str) -> list[Form]:
    same = {"member": member.id}
    roles = [(role, role) for role in MEMBER_ROLES if may_grant(my_role, role)]
    if member.disabled_at is not None:
        return [Form(PATH, "Enable", {"act": "restore", **same})]
    invited = members.state_of(member) == "invited"
    keys = [("stop", "stop"), ("keep", "work on, and you answer for them")]
    return [
        Form(
            PATH,
            "Send a new invitation" if invited else "Send a link for a new password",
            {"act": "invite", **same},
            about="Earlier links end.",
        ),
        Form(
            PATH,
            "Change role",
            {"act": "role", **same},
            [Input("role", "Role", "select", member.role, roles)],
        ),
        Form(
            PATH,
            "Set password",
            {"act": "password", **same},
            [Input("password", "New password", "password")],
            account=member.email,
        ),
        Form(
            PATH,
            "Remove",
            {"act": "remove", **same},
            [Input("keys", "Their keys", "select", "stop", keys)],
            confirm=member.email,
            danger=True,
        ),
    ]


def _new(my_role: str) -> Form:
    roles = [(role, role) for role in MEMBER_ROLES if may_grant(my_role, role)]
    inputs = [
        Input("email", "E-mail", "email"),
        Input("name", "Name", required=False),
        Input("role", "Role", "select", "developer", roles),
        Input(
            "password",
            "Password",
            "password",
            required=False,
            hint="Empty: the member chooses it by a link.",
        ),
    ]
    return Form(PATH, "Add member", {"act": "add"}, inputs, title="New member", panel=True)


def _change_row(each: AuditEntry, names: dict[str, str]) -> dict[str, Any]:
    named = (each.after or each.before or {}).get("name")
    words = "; ".join(audit_words.changes(each, names))
    return {
        "at": each.at,
        "actor": names.get(each.actor, each.actor),
        "action": each.action,
        "target": names.get(each.target) or named or each.target,
        "target_id": each.target,
        "change": words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…",
    }


def _ids_in(log: list[AuditEntry]) -> set[str]:
    """Whatever may be an id in the entries: actors, targets, and values that name something else."""
    found = {text for each in log for text in (each.actor, each.target)}
    values = [each for entry in log for each in (entry.before or {}, entry.after or {})]
    return found | {text for each in values for text in each.values() if isinstance(text, str)}


def _add(request: Request, form_fields: Fields) -> Response:
    """Without a password, as an invitation."""
    viewer, deps = viewer_of(request, "members", "write"), deps_of(request)
    email, password = form_fields.get("email", ""), form_fields.get("password") or None
    hashed = members.hash_for(deps.database, email, password) if password else None
    with deps.database.transaction() as session:
        member = members.add(
            session,
            viewer.scope,
            deps.clock,
            email=email,
            role=form_fields.get("role", ""),
            name=form_fields.get("name", ""),
            password_hash=hashed,
        )
        link = _send_link(request, session, viewer, member.id) if password is None else ""
    if password is not None:
        return redirect_with_notice(request, PATH, "member-added")
    return _linked(request, link)


def _invite(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "members", "write"), deps_of(request)
    with deps.database.transaction() as session:
        link = _send_link(request, session, viewer, form_fields.get("member", ""))
    return _linked(request, link)


def _send_link(request: Request, session: Session, viewer: Viewer, member_id: str) -> str:
    """Mails the link to the member alone; the link, to be shown, where no mail can be sent."""
    deps = deps_of(request)
    mails = deps.alert_targets.sends_mail
    made = invitations.invite(session, viewer.scope, deps.clock, member_id, shown=not mails)
    if not mails:
        return made.url(base_of(request))
    now = deps.clock.now()
    member_mails.send_link(session, viewer.scope.tenant_id, made, base_of(request), now)
    return ""


def _linked(request: Request, link: str) -> Response:
    if link:
        return redirect_with_secret(request, PATH, "member-invited", link)
    return redirect_with_notice(request, PATH, "member-mailed")


def _role(request: Request, form_fields: Fields) -> Response:
    return _change(request, form_fields, role=form_fields.get("role", ""))


def _restore(request: Request, form_fields: Fields) -> Response:
    return _change(request, form_fields, disabled=False)


def _remove(request: Request, form_fields: Fields) -> Response:
    """Disables the member without deleting it, so that the audit log can name it."""
    viewer, deps = viewer_of(request, "members", "write"), deps_of(request)
    with deps.database.transaction() as session:
        member = members.get(session, viewer.scope, form_fields.get("member", ""))
        require_confirmation(form_fields, member.email)
        keep = form_fields.get("keys") == "keep"
        members.change(session, viewer.scope, deps.clock, member.id, disabled=True, keep_keys=keep)
    return redirect_with_notice(request, PATH, "member-removed")


def _password(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "members", "write"), deps_of(request)
    with deps.database.read() as session:
        member = members.get(session, viewer.scope, form_fields.get("member", ""))
    hashed = members.hash_for(deps.database, member.email, form_fields.get("password", ""))
    with deps.database.transaction() as session:
        members.set_password(session, viewer.scope, deps.clock, member.id, hashed)
    return redirect_with_notice(request, PATH, "member-changed")


def _change(request: Request, form_fields: Fields, **changes: Any) -> Response:
    viewer, deps = viewer_of(request, "members", "write"), deps_of(request)
    with deps.database.transaction() as session:
        members.change(session, viewer.scope, deps.clock, form_fields.get("member", ""), **changes)
    return redirect_with_notice(request, PATH, "member-changed")


ROUTES = [
    Route(PATH, team, methods=["GET"]),
    Route(
        PATH,
        form_handler(
            team,
            add=_add,
            invite=_invite,
            role=_role,
            restore=_restore,
            remove=_remove,
            password=_password,
        ),
        methods=["POST"],
    ),
]
