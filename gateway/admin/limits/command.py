"""`tollhouse limit`: the limits of a tenant's plan, and the tenant's own limits."""

import argparse

from core.tenants import limits, organisations
from core.tenants.plans import DAY, HOUR, MINUTE, LimitRule, Scope, Unit
from gateway.admin.console import add_tenant, command_context, scope_named
from gateway.admin.output import add_json, show

HELP = "show, set and remove a tenant's limits"
_PERIODS = {"minute": MINUTE, "hour": HOUR, "day": DAY}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    listed = verbs.add_parser("list", help="list the limits in force")
    listed.set_defaults(run=_list)
    change = verbs.add_parser(
        "set", help="set a limit, which overrides the plan's of the same kind"
    )
    change.add_argument("limit", type=int)
    change.add_argument("--shadow", action="store_true", help="count and report without refusing")
    change.set_defaults(run=_set)
    remove = verbs.add_parser("remove", help="remove a limit, so that the plan's applies")
    remove.set_defaults(run=_remove)
    for each in (change, remove):
        each.add_argument("--scope", choices=[str(scope) for scope in Scope], default="tenant")
        each.add_argument("--unit", choices=[str(unit) for unit in Unit], default="requests")
        each.add_argument("--per", choices=sorted(_PERIODS), default="minute")
        each.add_argument("--target", default="", help="one project, key or model; default: each")
    for each in (listed, change, remove):
        add_tenant(each)
        add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        tenant = organisations.tenant_named(session, arguments.tenant)
        own = limits.own_rules(session, scope_named(session, arguments.tenant))
        plan = limits.plan_of(session, tenant)
    rows = [limits.describe(rule) | {"own": rule in own} for rule in plan.rules]
    show(rows, as_json=arguments.json, title=f"limits (plan {plan.name})")
    return 0


def _set(arguments: argparse.Namespace) -> int:
    rule = _rule(arguments, arguments.limit, shadow=arguments.shadow)
    with command_context() as tools, tools.database.transaction() as session:
        limits.set_rule(session, scope_named(session, arguments.tenant), tools.clock, rule)
    show(limits.describe(rule), as_json=arguments.json, title="limit")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    rule = _rule(arguments, 1, shadow=False)
    with command_context() as tools, tools.database.transaction() as session:
        limits.remove_rule(session, scope_named(session, arguments.tenant), tools.clock, rule)
    show({"removed": rule.name, "target": rule.target}, as_json=arguments.json)
    return 0


def _rule(arguments: argparse.Namespace, limit: int, *, shadow: bool) -> LimitRule:
    period = _PERIODS[arguments.per]
    scope, unit = Scope(arguments.scope), Unit(arguments.unit)
    return LimitRule(scope, unit, limit, period, arguments.target, shadow)
