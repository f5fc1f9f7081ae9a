"""`tollhouse tenant`: the verbs for add-ons to billing plans."""

import argparse
from typing import Any

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.pricing.exchange_rates import check_currency
from billing.subscriptions import add_ons, subscriptions
from core.ids import new_id
from core.tenants import audit
from gateway.admin.adjustments.approval import submit
from gateway.admin.console.amounts import units_of_amount
from gateway.admin.console.context import command_context
from gateway.admin.console.options import ACTOR, add_tenant, scope_named
from gateway.admin.console.output import add_json, show


def add_add_ons(verbs: Any) -> None:
    new = verbs.add_parser("add-on-add", help="create an add-on to billing plans")
    new.add_argument("name")
    new.add_argument("--fee", required=True, metavar="AMOUNT", help="per unit and interval")
    new.add_argument("--currency", default="USD")
    new.add_argument("--interval", choices=[subscriptions.MONTH, subscriptions.YEAR])
    new.set_defaults(run=_create, interval=subscriptions.MONTH)
    listed = verbs.add_parser("add-ons", help="list the add-ons, or those of a tenant")
    listed.add_argument("--tenant", help="name or id")
    listed.set_defaults(run=_list)
    change = verbs.add_parser("add-on", help="set how many units of an add-on a tenant has")
    change.add_argument("name")
    change.add_argument("--quantity", type=int, default=1, help="0 removes it; default: 1")
    add_tenant(change)
    change.set_defaults(run=_set)
    for each in (new, listed, change):
        add_json(each)


def _create(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        created = add_ons.create(
            session,
            tools.clock.now(),
            arguments.name,
            units_of_amount(arguments.fee),
            currency=check_currency(arguments.currency, "currency"),
            interval=arguments.interval,
        )
        row = add_ons.describe(created)
        audit.record_operator(
            session, tools.clock, ACTOR, "add_on.create", created.id, before=None, after=row
        )
    _show([row], arguments)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        if arguments.tenant:
            scope = scope_named(session, arguments.tenant)
            rows = add_ons.of_tenant(session, scope.tenant_id)
        else:
            rows = [add_ons.describe(each) for each in add_ons.listed(session)]
    _show(rows, arguments)
    return 0


def _set(arguments: argparse.Namespace) -> int:
    terms = {"add_on": arguments.name, "quantity": arguments.quantity}
    with command_context() as tools:
        asked = ActRequest(Kind.ADD_ON, arguments.tenant, new_id("addon"), terms=terms)
        act = submit(tools, asked)
        if act.status == money_acts.POSTED:
            with tools.database.read() as session:
                _show(add_ons.of_tenant(session, act.tenant_id), arguments)
    return 0


def _show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if not arguments.json:
        rows = [row | {"fee": f"{row['fee']['amount']} {row['fee']['currency']}"} for row in rows]
    show(rows, as_json=arguments.json, title="add-ons")
