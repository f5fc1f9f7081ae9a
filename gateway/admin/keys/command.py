"""`tollhouse key`: API keys. A key's secret is printed once, when it is issued."""

import argparse
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from core.errors import NotFound
from core.tenants import adapters, key_changes, key_routing, key_scopes, keys
from core.tenants.key_routing import CANARY, FALLBACK, parse_chains, parse_shares
from core.tenants.key_scopes import KeyScopes
from core.tenants.models import ApiKey
from core.tenants.roles import MEMBER_ROLES
from core.tenants.scope import TenantScope
from gateway.admin.console import (
    CommandContext,
    add_tenant,
    command_context,
    project_named,
    scope_named,
)
from gateway.admin.engines.served import known_names
from gateway.admin.output import add_json, say, show
from gateway.edge.decoding import parse_datetime

HELP = "issue, list, rotate and revoke API keys"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    new = verbs.add_parser("new", help="issue a key; its secret is shown only once")
    new.add_argument("--project", default="default", help="name or id (default: default)")
    new.add_argument("--name", default="key")
    new.add_argument("--role", choices=MEMBER_ROLES, default="developer")
    new.add_argument("--model", action="append", metavar="NAME", help="only these models")
    new.add_argument("--adapter", action="append", metavar="NAME", help="only these adapters")
    new.add_argument(
        "--route",
        action="append",
        metavar="PATH",
        help="only these routes; PREFIX* matches a prefix",
    )
    new.add_argument(
        "--ip", action="append", default=[], metavar="CIDR", help="only from these addresses"
    )
    new.add_argument("--expires", metavar="WHEN", help="2027-01-31 or 2027-01-31T12:00:00+00:00")
    _routing_options(new)
    new.set_defaults(run=_new)
    change = verbs.add_parser(
        "set", help="change a key's name, what it may use, from where and until when"
    )
    change.add_argument("key_id")
    change.add_argument("--name")
    for name, value, what in (
        ("model", "NAME", "models"),
        ("adapter", "NAME", "adapters"),
        ("route", "PATH", "routes"),
    ):
        either = change.add_mutually_exclusive_group()
        either.add_argument(f"--{name}", action="append", metavar=value, help=f"only these {what}")
        either.add_argument(f"--all-{what}", action="store_true", help=f"all {what}")
    either = change.add_mutually_exclusive_group()
    either.add_argument("--ip", action="append", metavar="CIDR", help="only from these addresses")
    either.add_argument("--any-ip", action="store_true", help="from any address")
    either = change.add_mutually_exclusive_group()
    either.add_argument("--expires", metavar="WHEN", help="2027-01-31 or 2027-01-31T12:00:00+00:00")
    either.add_argument("--no-end", action="store_true", help="the key does not expire")
    _routing_options(change)
    change.set_defaults(run=_change)
    listed = verbs.add_parser("list", help="list the keys of a tenant")
    listed.set_defaults(run=_list)
    rotate = verbs.add_parser(
        "rotate", help="replace a key with a new one that has the same rights"
    )
    rotate.add_argument("key_id")
    rotate.add_argument(
        "--overlap-hours",
        type=int,
        default=24,
        help="hours that the old key stays valid (default 24)",
    )
    rotate.set_defaults(run=_rotate)
    revoke = verbs.add_parser("revoke", help="revoke a key; it takes effect within a second")
    revoke.add_argument("key_id")
    revoke.set_defaults(run=_revoke)
    for each in (change, rotate, revoke):
        each.add_argument("--tenant", help="name or id (default: the key's own)")
    for each in (new, listed):
        add_tenant(each)
    for each in (new, listed, change, rotate, revoke):
        add_json(each)


def _routing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fallback",
        metavar="CHAINS",
        help="models to try in turn, such as small=large,other; off: none; empty: the tenant's",
    )
    parser.add_argument(
        "--canary",
        metavar="SHARES",
        help="percent of a model's conversations for others, such as small=large:5; empty: the "
        "tenant's",
    )


def _routing(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options name; None removes it."""
    given: dict[str, Any] = {}
    if arguments.fallback is not None:
        given[FALLBACK] = parse_chains(arguments.fallback)
    if arguments.canary is not None:
        given[CANARY] = parse_shares(arguments.canary)
    return given


def _new(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        _check_names(tools, session, scope, arguments)
        issued = keys.issue(
            session,
            scope,
            tools.clock,
            project_id=project_named(session, scope, arguments.project),
            name=arguments.name,
            role=arguments.role,
            scopes=KeyScopes(
                models=_set(arguments.model),
                adapters=_set(arguments.adapter),
                routes=_set(arguments.route),
            ),
            allowed_ips=tuple(arguments.ip),
            expires_at=parse_datetime(arguments.expires, "--expires")
            if arguments.expires
            else None,
            routing={name: each for name, each in _routing(arguments).items() if each is not None},
        )
    _print_secret(issued, as_json=arguments.json)
    return 0


def _check_names(
    tools: CommandContext, session: Session, scope: TenantScope, arguments: argparse.Namespace
) -> None:
    """BadRequest for a model or an adapter that nothing has."""
    known = known_names(tools, session)
    own = [each.name for each in adapters.all_of(session, scope)]
    scopes = {"models": arguments.model, "adapters": getattr(arguments, "adapter", None)}
    routing = _routing(arguments)
    key_routing.check(routing, "routing")
    key_scopes.check(scopes)
    key_scopes.check_names(scopes, routing, known, own)


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        results = keys.all_of(session, scope_named(session, arguments.tenant))
        rows = [keys.describe(each) for each in results]
        models = [keys.models_of(each) for each in results]
    if not arguments.json:
        names = ("id", "name", "role", "last_four", "expires_at", "revoked_at", "last_used_at")
        rows = [
            {name: row[name] for name in names} | {"models": allowed}
            for row, allowed in zip(rows, models, strict=True)
        ]
    show(rows, as_json=arguments.json, title="keys")
    return 0


def _change(arguments: argparse.Namespace) -> int:
    scopes: dict[str, Any] = {
        name: None for name in key_scopes.NAMES if getattr(arguments, f"all_{name}")
    }
    scopes |= {name: given for name in key_scopes.NAMES if (given := getattr(arguments, name[:-1]))}
    changed = key_changes.KeyChange(
        name=arguments.name,
        scopes=scopes or None,
        routing=_routing(arguments) or None,
        allowed_ips=[] if arguments.any_ip else arguments.ip,
        expires_at=parse_datetime(arguments.expires, "--expires") if arguments.expires else None,
        no_end=arguments.no_end,
    )
    with command_context() as tools, tools.database.transaction() as session:
        scope = _scope_of(session, arguments)
        _check_names(tools, session, scope, arguments)
        key = key_changes.change(session, scope, tools.clock, arguments.key_id, changed)
        shown = keys.describe(key)
    show(shown, as_json=arguments.json, title="key")
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        issued = keys.rotate(
            session,
            _scope_of(session, arguments),
            tools.clock,
            arguments.key_id,
            overlap=timedelta(hours=arguments.overlap_hours),
        )
    _print_secret(issued, as_json=arguments.json)
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = _scope_of(session, arguments)
        keys.revoke(session, scope, tools.clock, arguments.key_id)
        shown = keys.describe(keys.get(session, scope, arguments.key_id))
    show(shown, as_json=arguments.json, title="key")
    return 0


def _scope_of(session: Session, arguments: argparse.Namespace) -> TenantScope:
    """Of the tenant that is named, else of the one that the key belongs to."""
    if arguments.tenant:
        return scope_named(session, arguments.tenant)
    key = session.get(ApiKey, arguments.key_id)
    if key is None:
        raise NotFound(
            f"There is no key {arguments.key_id[:80]!r}.",
            next_step="List keys with `tollhouse key list --tenant NAME`.",
        )
    return scope_named(session, key.tenant_id)


def _print_secret(issued: keys.IssuedKey, *, as_json: bool) -> None:
    if as_json:
        show({"id": issued.id, "secret": issued.secret}, as_json=True)
        return
    say(f"{issued.id}: save the secret; it is not shown again.")
    show(issued.secret, as_json=False)


def _set(listed: list[str] | None) -> frozenset[str] | None:
    return frozenset(listed) if listed else None
