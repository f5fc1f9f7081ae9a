"""`tollhouse policy`: a tenant's moderation policies, decisions and appeals."""

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.admin.console import ACTOR, add_tenant, command_context, scope_named, tenant_id_of
from gateway.admin.output import add_json, show
from gateway.metering.spool_watch import wait_until_shipped
from moderation import appeals, policies, records, strikes
from moderation.dry_run import dry_run
from moderation.policy import Policy, default_policy
from moderation.records import every_decision


def _add_decisions(verbs: Any) -> None:
    decisions = verbs.add_parser("decisions", help="list moderation decisions, newest first")
    decisions.add_argument("--action", choices=("allow", "annotate", "redact", "block"))
    decisions.add_argument("--acted", action="store_true", help="only decisions other than allow")
    decisions.add_argument("--limit", type=int, default=50, help="maximum rows (default 50)")
    decisions.set_defaults(run=_decisions)
    export = verbs.add_parser("export", help="write every decision as CSV to stdout")
    export.add_argument("--days", type=int, default=31, help="how far back (default 31)")
    export.set_defaults(run=_export)
    listing = verbs.add_parser("appeals", help="list appeals of decisions")
    listing.add_argument("--status", choices=appeals.STATUSES)
    listing.set_defaults(run=_appeals)
    appeal_verb = verbs.add_parser("appeal", help="appeal a decision")
    appeal_verb.add_argument("request", help="the request's id")
    appeal_verb.add_argument("--reason", required=True)
    appeal_verb.add_argument("--direction", choices=("input", "output"), default="input")
    appeal_verb.set_defaults(run=_appeal)
    ruling = verbs.add_parser("rule", help="grant or deny an appeal")
    ruling.add_argument("appeal", help="the appeal's id")
    decision = ruling.add_mutually_exclusive_group(required=True)
    decision.add_argument("--grant", action="store_true", help="grant it and void the strike")
    decision.add_argument("--deny", action="store_true", help="deny it")
    ruling.add_argument("--answer", default="", help="a message to the tenant")
    ruling.set_defaults(run=_rule)
    suspended = verbs.add_parser("suspensions", help="list keys that the strike rule suspended")
    suspended.set_defaults(run=_suspensions)
    lift = verbs.add_parser(
        "lift-suspension", aliases=["free"], help="lift the suspension of a key"
    )
    lift.add_argument("key", help="the key's id")
    lift.set_defaults(run=_lift)
    for each in (decisions, listing, appeal_verb, ruling, suspended, lift):
        add_json(each)
    for each in (decisions, export, listing, appeal_verb, ruling, suspended, lift):
        add_tenant(each)


def _decisions(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        with tools.database.read() as session:
            results = records.decisions(
                session,
                scope_named(session, arguments.tenant),
                action=arguments.action,
                acted=arguments.acted,
                limit=arguments.limit,
            )
            rows = [records.describe(each) for each in results]
    if not arguments.json:
        columns = ("at", "request_id", "direction", "action", "categories", "policy_version")
        rows = [{name: row[name] for name in columns} for row in rows]
    show(rows, as_json=arguments.json, title="decisions")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        until = tools.clock.now()
        since = until - timedelta(days=arguments.days)
        with tools.database.read() as session:
            scope = scope_named(session, arguments.tenant)
            for line in records.export_csv(records.every_decision(session, scope, since, until)):
                sys.stdout.write(line)
    return 0


def _appeals(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        scope = scope_named(session, arguments.tenant)
        results = appeals.appeals(session, scope, arguments.status)
        rows = [appeals.describe(each) for each in results]
    show(rows, as_json=arguments.json, title="appeals")
    return 0


def _appeal(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        with tools.database.transaction() as session:
            appeal = appeals.open_appeal(
                session,
                scope_named(session, arguments.tenant),
                tools.clock,
                arguments.request,
                arguments.reason,
                arguments.direction,
            )
            row = appeals.describe(appeal)
    show(row, as_json=arguments.json, title="appeal")
    return 0


def _rule(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        appeal = appeals.decide(
            session,
            scope_named(session, arguments.tenant),
            tools.clock,
            arguments.appeal,
            grant=arguments.grant,
            answer=arguments.answer,
        )
        row = appeals.describe(appeal)
    show(row, as_json=arguments.json, title="appeal")
    return 0


def _suspensions(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        results = strikes.suspensions(session, scope_named(session, arguments.tenant))
        rows = [strikes.describe(each) for each in results]
    show(rows, as_json=arguments.json, title="suspended keys")
    return 0


def _lift(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        strikes.lift(session, scope, tools.clock, arguments.key)
    show({"key_id": arguments.key, "suspended": False}, as_json=arguments.json)
    return 0


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
    _add_decisions(verbs)


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
