"""`tollhouse policy`: the verbs for decisions, appeals and suspended keys."""

import argparse
import sys
from datetime import timedelta
from typing import Any

from gateway.admin.console.context import command_context
from gateway.admin.console.options import add_tenant, scope_named
from gateway.admin.console.output import add_json, show
from gateway.metering.spool_watch import wait_until_shipped
from moderation import appeals, records, strikes


def configure(verbs: Any) -> None:
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
