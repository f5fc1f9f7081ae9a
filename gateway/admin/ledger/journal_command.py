"""`tollhouse export`: a month's journal for accounting programs, and the trial balance."""

import argparse
from typing import Any

from billing.ledger import account_statement, journal
from billing.ledger.account_statement import StatementQuery
from billing.ledger.ledger import AccountKind
from core.errors import BadRequest
from gateway.admin.console import command_context, tenant_id_of
from gateway.admin.output import add_json, say, show
from gateway.edge.decoding import parse_datetime


def add_journal(verbs: Any) -> None:
    month = verbs.add_parser("journal", help="write a month's journal for an accounting program")
    month.add_argument("month", help="such as 2026-01, in UTC")
    month.add_argument("--shape", choices=list(journal.Shape), default=journal.Shape.PLAIN)
    month.add_argument(
        "--account", action="append", default=[], metavar="NAME=CODE", help="code of an account"
    )
    month.add_argument("--output", metavar="FILE", help="default: stdout")
    month.set_defaults(run=_journal)
    balance = verbs.add_parser("trial-balance", help="debits and credits by account")
    balance.set_defaults(run=_trial_balance)
    account = verbs.add_parser(
        "ledger-account", help="the entries of an account, with the balance after each"
    )
    account.add_argument("account", choices=list(AccountKind))
    account.add_argument("--tenant", help="name or id; default: all tenants together")
    account.add_argument("--currency", default="USD")
    account.add_argument("--from", dest="start", metavar="DATE", help="first day, UTC")
    account.add_argument("--to", dest="end", metavar="DATE", help="day after the last, UTC")
    account.set_defaults(run=_account)
    for each in (balance, account):
        add_json(each)


def _journal(arguments: argparse.Namespace) -> int:
    codes = {}
    for given in arguments.account:
        name, separator, code = given.partition("=")
        if not separator or not code:
            raise BadRequest(f"--account {given}.", next_step="Write it as revenue=4000.")
        codes[name] = code
    with command_context() as tools, tools.database.read() as session:
        shape = journal.Shape(arguments.shape)
        text = journal.journal(session, arguments.month, shape, codes)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        say(f"Wrote {arguments.output}.")
    else:
        print(text, end="")
    return 0


def _account(arguments: argparse.Namespace) -> int:
    start = parse_datetime(arguments.start, "--from") if arguments.start else None
    end = parse_datetime(arguments.end, "--to") if arguments.end else None
    with command_context() as tools, tools.database.read() as session:
        tenant_id = tenant_id_of(session, arguments.tenant) if arguments.tenant else ""
        query = account_statement.check(
            StatementQuery(arguments.account, arguments.currency.upper(), tenant_id, start, end)
        )
        rows = list(account_statement.all_lines(session, query))
    if not arguments.json:
        names = ("debit", "credit", "balance")
        rows = [row | {name: row[name]["amount"] for name in names} for row in rows]
    show(rows, as_json=arguments.json, title=f"{arguments.account} in {query.currency}")
    return 0


def _trial_balance(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = journal.trial_balance(session)
    if not arguments.json:
        rows = [
            row | {name: row[name]["amount"] for name in ("debit", "credit", "balance")}
            for row in rows
        ]
    show(rows, as_json=arguments.json, title="trial balance")
    return 0
