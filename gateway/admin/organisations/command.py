"""`tollhouse tenant`: organisations above organisations."""

import argparse
from datetime import timedelta
from typing import Any

from billing.adjustments import organisation_links
from billing.organisations import organisation_usage, organisations
from billing.rating.rating_worker import rate_all
from core.errors import BadRequest
from gateway.admin.console import ACTOR, add_tenant, command_context, scope_named, tenant_id_of
from gateway.admin.output import add_json, show
from gateway.edge.decoding import parse_datetime
from gateway.metering.spool_watch import wait_until_shipped


def add_organisations(verbs: Any) -> None:
    link = verbs.add_parser("parent", help="put a tenant below another, or change who pays")
    add_tenant(link)
    link.add_argument("parent", help="name or id of the organisation above")
    link.add_argument(
        "--pays", choices=organisations.PAYS, default=organisations.SELF, help="for the tenant"
    )
    link.add_argument("--markup", default="0", metavar="PERCENT", help="on the tenant's charges")
    link.set_defaults(run=_link)
    unlink = verbs.add_parser("parent-remove", help="take a tenant out from below its parent")
    add_tenant(unlink)
    unlink.set_defaults(run=_unlink)
    below = verbs.add_parser("children", help="show the usage of a tenant and of all below it")
    add_tenant(below)
    below.add_argument(
        "--from", dest="start", metavar="DATE", help="first day; default: this month"
    )
    below.add_argument("--to", dest="end", metavar="DATE", help="day after the last, UTC")
    below.add_argument("--by-model", action="store_true")
    below.set_defaults(run=_children)
    for each in (link, unlink, below):
        add_json(each)


def _link(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        draft = organisation_links.LinkDraft(
            tenant_id_of(session, arguments.tenant),
            tenant_id_of(session, arguments.parent),
            arguments.pays,
            arguments.markup,
            ACTOR,
        )
        shown = organisations.describe(
            session, organisation_links.set_parent(session, tools.clock, draft)
        )
    show(shown, as_json=arguments.json, title="organisation")
    return 0


def _unlink(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        link = organisation_links.remove_parent(session, tenant_id_of(session, arguments.tenant))
        shown = {**organisations.describe(session, link), "removed": True}
    show(shown, as_json=arguments.json, title="organisation")
    return 0


def _children(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        rate_all(tools.database, tools.clock)
        end = parse_datetime(arguments.end, "--to") if arguments.end else tools.clock.now()
        start = parse_datetime(arguments.start, "--from") if arguments.start else None
        start = start or (end - timedelta(microseconds=1)).replace(
            day=1, hour=0, minute=0, second=0, microsecond=0
        )
        if start >= end:
            raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
        with tools.database.read() as session:
            scope = scope_named(session, arguments.tenant)
            found = organisation_usage.read(session, scope, start, end, by_model=arguments.by_model)
    rows = organisation_usage.rollup_json(found)
    if not arguments.json:
        amounts = ("amount", "markup", "with_markup")
        rows = [row | {name: row[name]["amount"] for name in amounts} for row in rows]
    show(rows, as_json=arguments.json, title="usage of organisations")
    return 0
