"""`tollhouse member`: the members of a tenant."""

import argparse
from typing import Any

from sqlalchemy.orm import Session

from billing.notices import member_mails
from core.errors import NotFound
from core.tenants import invitations, members
from core.tenants.models import Member
from core.tenants.passwords import PasswordHash
from core.tenants.roles import MEMBER_ROLES
from core.tenants.scope import TenantScope
from gateway.admin.console import (
    PASSWORD_SOURCE,
    CommandContext,
    add_tenant,
    command_context,
    password_from,
    scope_named,
)
from gateway.admin.output import add_json, show

HELP = "add, list and change the members of a tenant"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    add = verbs.add_parser(
        "add", help="add a member; without a password, with a link to choose one"
    )
    add.add_argument("email")
    add.add_argument("--role", choices=MEMBER_ROLES, default="viewer")
    add.add_argument("--name", default="")
    add.add_argument("--password-file", metavar="FILE", help=PASSWORD_SOURCE)
    add.set_defaults(run=_add)
    listed = verbs.add_parser("list", help="list the members of a tenant")
    listed.set_defaults(run=_list)
    change = verbs.add_parser(
        "set", help="change a member's role or password; disable or enable it"
    )
    change.add_argument("email")
    change.add_argument("--role", choices=MEMBER_ROLES)
    change.add_argument("--password-file", metavar="FILE", help=PASSWORD_SOURCE)
    state = change.add_mutually_exclusive_group()
    state.add_argument("--disable", dest="disabled", action="store_true", default=None)
    change.add_argument(
        "--keep-keys",
        action="store_true",
        help="with --disable: the member's keys work on; nobody answers for them",
    )
    state.add_argument("--enable", dest="disabled", action="store_false", default=None)
    change.set_defaults(run=_set)
    invite = verbs.add_parser("invite", help="make a one-time link to choose a password or sign on")
    invite.add_argument("email")
    invite.set_defaults(run=_invite)
    for each in (add, listed, change, invite):
        add_tenant(each)
        add_json(each)


def _add(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        hashed = _hash(tools, arguments)
        with tools.database.transaction() as session:
            scope = scope_named(session, arguments.tenant)
            created = members.add(
                session,
                scope,
                tools.clock,
                email=arguments.email,
                role=arguments.role,
                name=arguments.name,
                password_hash=hashed,
            )
            invitation = None if hashed else _link(session, scope, tools, created.id)
            shown = members.describe(created) | ({"invitation": invitation} if invitation else {})
    show(shown, as_json=arguments.json, title="member")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        results = members.all_of(session, scope_named(session, arguments.tenant))
        rows = [members.describe(each) for each in results]
    if not arguments.json:
        names = ("email", "role", "state", "password", "sso", "last_seen_at")
        rows = [{name: row[name] for name in names} for row in rows]
    show(rows, as_json=arguments.json, title="members")
    return 0


def _set(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        hashed = _hash(tools, arguments)
        with tools.database.transaction() as session:
            scope = scope_named(session, arguments.tenant)
            member = _find_member(session, scope, arguments.email)
            if hashed is not None:
                members.set_password(session, scope, tools.clock, member.id, hashed)
            if arguments.role is not None or arguments.disabled is not None:
                members.change(
                    session,
                    scope,
                    tools.clock,
                    member.id,
                    role=arguments.role,
                    disabled=arguments.disabled,
                    keep_keys=arguments.keep_keys,
                )
            shown = members.describe(member)
    show(shown, as_json=arguments.json, title="member")
    return 0


def _hash(tools: CommandContext, arguments: argparse.Namespace) -> PasswordHash | None:
    """Of the password in the file that the option names, if it does."""
    password = password_from(arguments.password_file)
    return members.hash_for(tools.database, arguments.email, password) if password else None


def _invite(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        member = _find_member(session, scope, arguments.email)
        shown = {"email": member.email} | _link(session, scope, tools, member.id)
    show(shown, as_json=arguments.json, title="invitation")
    return 0


def _link(
    session: Session, scope: TenantScope, tools: CommandContext, member_id: str
) -> dict[str, Any]:
    made = invitations.invite(session, scope, tools.clock, member_id)
    base = tools.settings.public_url
    mailed = bool(base and tools.settings.smtp_url)
    if mailed:
        member_mails.send_link(session, scope.tenant_id, made, base, tools.clock.now())
    return {"url": made.url(base), "expires_at": made.expires_at.isoformat(), "mailed": mailed}


def _find_member(session: Session, scope: TenantScope, email: str) -> Member:
    for member in members.all_of(session, scope):
        if email.lower() in (member.email, member.id):
            return member
    raise NotFound(
        f"There is no member {email}.", next_step="List members with `tollhouse member list`."
    )
