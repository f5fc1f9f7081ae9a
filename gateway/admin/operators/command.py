"""`tollhouse operator`: named operators, each with a token and a role."""

import argparse

from core.tenants import operators
from core.tenants.roles import ACCOUNTANT, OPERATOR_ROLES
from gateway.admin.console import ACTOR, command_context
from gateway.admin.output import add_json, say, show

HELP = "add, list and disable named operators"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    new = verbs.add_parser("add", help="add an operator; prints the token once")
    new.add_argument("name", help="such as ann; audit rows show it as operator:ann")
    new.add_argument("--role", choices=OPERATOR_ROLES, default=ACCOUNTANT)
    new.set_defaults(run=_add)
    listed = verbs.add_parser("list", help="list all operators")
    listed.set_defaults(run=_list)
    end = verbs.add_parser("disable", help="end an operator's token and sessions")
    end.add_argument("name")
    end.set_defaults(run=_disable)
    for each in (new, listed, end):
        add_json(each)


def _add(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        created, secret = operators.add(session, tools.clock, ACTOR, arguments.name, arguments.role)
        shown = operators.describe(created) | {"token": secret}
    show(shown, as_json=arguments.json, title="operator")
    say(
        "The token is shown once. It signs in to the dashboard and is the bearer token of /admin/v1."
    )
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [operators.describe(each) for each in operators.everyone(session)]
    show(rows, as_json=arguments.json, title="operators")
    return 0


def _disable(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        shown = operators.describe(operators.disable(session, tools.clock, ACTOR, arguments.name))
    show(shown, as_json=arguments.json, title="operator")
    return 0
