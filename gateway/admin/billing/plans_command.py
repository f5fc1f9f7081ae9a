"""`tollhouse tenant`: the verbs for billing plans, to which tenants subscribe."""

import argparse
from typing import Any

from sqlalchemy import select

from billing.reports import subscription_views
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from core.errors import BadRequest
from core.money import units_of
from gateway.admin.console import command_context
from gateway.admin.output import add_json, show

_AMOUNTS = {
    "base_fee": "fee per interval",
    "seat_fee": "fee per seat and interval",
    "included_usage": "usage per billing period that the fee covers",
    "minimum_commitment": "least amount of usage charged per interval of the commitment",
}
_COLUMNS = ("name", "currency", "interval", "base_fee", "seat_fee", "minimum_commitment")


def add_billing_plans(verbs: Any) -> None:
    new = verbs.add_parser("plan-add", help="create a billing plan")
    new.add_argument("name")
    new.add_argument("--currency", default="USD")
    new.add_argument("--interval", choices=[subscriptions.MONTH, subscriptions.YEAR])
    new.add_argument(
        "--commitment-interval",
        choices=[subscriptions.MONTH, subscriptions.YEAR],
        help="default: that of the fees",
    )
    new.add_argument("--in-advance", action="store_true", help="bill the fees ahead")
    for name, about in _AMOUNTS.items():
        option = "--" + name.replace("_", "-")
        new.add_argument(option, default="0", metavar="AMOUNT", help=f"{about}, in major units")
    new.add_argument("--included-seats", type=int, default=0, metavar="NUMBER")
    new.add_argument("--trial-days", type=int, default=0, metavar="DAYS")
    new.add_argument("--limits-plan", metavar="NAME", help="limits plan of its tenants")
    new.set_defaults(run=_create, interval=subscriptions.MONTH)
    listed = verbs.add_parser("plans", help="list the billing plans")
    listed.set_defaults(run=_list)
    for each in (new, listed):
        add_json(each)


def _create(arguments: argparse.Namespace) -> int:
    fields = {
        "name": arguments.name,
        "currency": arguments.currency.upper(),
        "interval": arguments.interval,
        "commitment_interval": arguments.commitment_interval,
        "in_advance": arguments.in_advance,
        "included_seats": arguments.included_seats,
        "trial_days": arguments.trial_days,
        "limits_plan": arguments.limits_plan,
    }
    fields |= {name: _units(name, getattr(arguments, name)) for name in _AMOUNTS}
    with command_context() as tools, tools.database.transaction() as session:
        created = subscriptions.create_plan(session, tools.clock.now(), fields)
        row = subscription_views.plan_json(created)
    show(row if arguments.json else _row(row), as_json=arguments.json, title="billing plan")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        found = session.scalars(select(Plan).order_by(Plan.name))
        rows = [subscription_views.plan_json(each) for each in found]
    shown = rows if arguments.json else [_row(row) for row in rows]
    show(shown, as_json=arguments.json, title="billing plans")
    return 0


def _units(name: str, amount: str) -> int:
    try:
        return units_of(amount)
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise BadRequest(f"{option} {amount}: {error}.", next_step="Write it as 100.50.") from None


def _row(plan: dict[str, Any]) -> dict[str, Any]:
    return {
        name: plan[name]["amount"] if isinstance(plan[name], dict) else plan[name]
        for name in _COLUMNS
    }
