"""`tollhouse policy`: a tenant's moderation policies, decisions and appeals."""

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.admin.console.context import command_context
from gateway.admin.console.options import ACTOR, add_tenant
from gateway.admin.console.output import add_json, show
from gateway.admin.console.tenants import tenant_id_of
from gateway.admin.policies import verbs as _moderation_verbs
from moderation import policies
from moderation.dry_run import dry_run
from moderation.policy import Policy, default_policy
from moderation.records import every_decision

HELP = "show, try, set and retire moderation policies; decisions, appeals and suspensions"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    default = verbs.add_parser("default", help="show the default policy")
    default.set_defaults(run=_default)
    listing = verbs.add_parser("list", help="list policy versions, newest first")
    listing.set_defaults(run=_list)
    setting = verbs.add_parser("set", help="put a policy in force immediately")
    setting.add_argument("file", help="JSON document in the form of `policy default --json`")
    setting.set_defaults(run=_set)
    retire = verbs.add_parser("retire", help="take a policy out of force")
    retire.set_defaults(run=_retire)
    trial = verbs.add_parser("try", help="apply a policy to recorded decisions as a dry run")
    trial.add_argument("file")
    trial.add_argument("--days", type=int, default=30, help="how far back (default 30)")
    trial.set_defaults(run=_try)
    for each in (setting, retire):
        each.add_argument("--level", choices=policies.LEVELS, default="tenant")
        each.add_argument("--target", help="id of the project or key")
    for each in (default, listing, setting, retire, trial):
        add_json(each)
    for each in (listing, setting, retire, trial):
        add_tenant(each)
    _moderation_verbs.configure(verbs)


def _default(arguments: argparse.Namespace) -> int:
    show(default_policy().to_dict(), as_json=arguments.json, title="default policy")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [
            {
                "version": row.version,
                "level": row.level,
                "target": row.target,
                "from": row.created_at.isoformat(),
                "to": row.retired_at.isoformat() if row.retired_at else None,
                "by": row.created_by,
            }
            for row in policies.history(session, _scope(session, arguments))
        ]
    show(rows, as_json=arguments.json, title="policies")
    return 0


def _set(arguments: argparse.Namespace) -> int:
    document = _document(arguments.file)
    with command_context() as tools, tools.database.transaction() as session:
        saved = policies.put(
            session,
            _scope(session, arguments),
            tools.clock,
            document,
            level=arguments.level,
            target=arguments.target,
        )
    show({"version": saved.version, "level": arguments.level}, as_json=arguments.json)
    return 0


def _retire(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = _scope(session, arguments)
        policies.retire(session, scope, tools.clock, level=arguments.level, target=arguments.target)
    show({"retired": arguments.level}, as_json=arguments.json)
    return 0


def _try(arguments: argparse.Namespace) -> int:
    policy = Policy.from_dict(_document(arguments.file))
    with command_context() as tools, tools.database.read() as session:
        until = tools.clock.now()
        since = until - timedelta(days=arguments.days)
        scope = _scope(session, arguments)
        decisions = every_decision(session, scope, since, until)
        document = dry_run(policy, decisions, policies.in_force(session, scope, "", ""))
    changes = {f"{was} -> {would}": number for (was, would), number in document.changes.items()}
    show(
        {
            "version": document.policy_version,
            "decided": document.decided,
            "changes": changes,
            "untried": list(document.untried),
        },
        as_json=arguments.json,
        title="dry run",
    )
    return 0


def _scope(session: Session, arguments: argparse.Namespace) -> TenantScope:
    return scope_of_operator(tenant_id_of(session, arguments.tenant), ACTOR)


def _document(file: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(file).read_text())
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise BadRequest(f"{file} is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise BadRequest(
            f"{file} is not a JSON object.", next_step="See `tollhouse policy default --json`."
        )
    return document
