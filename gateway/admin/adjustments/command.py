"""`tollhouse money`: acts on money, their previews, and their confirmation by a second operator."""

import argparse
from pathlib import Path
from typing import Any

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.adjustments.money_acts import FourEyes
from billing.adjustments.tables import MoneyAct
from billing.payments import dunning
from billing.reports import month_end
from core.errors import BadRequest
from core.money import decimal_of
from core.tenants import operators
from gateway.admin.console import CommandContext, command_context, units_of_amount
from gateway.admin.output import add_json, say, show

# A user of this machine has the deployment's own token, so both are one person.
OPERATOR = "operator"


def submit(tools: CommandContext, asked: ActRequest, token_file: Path | None = None) -> MoneyAct:
    rule = FourEyes.of(tools.settings.four_eyes_above)
    with tools.database.transaction() as session:
        act = money_acts.submit(session, tools.clock, asked, actor(tools, token_file), rule)
    if act.status == money_acts.WAITING:
        say(
            f"Nothing is posted yet: {act.id} waits for a second operator (tollhouse money confirm)."
        )
    else:
        dunning.settle(tools.database, tools.clock)
    return act


def actor(tools: CommandContext, token_file: Path | None) -> str:
    """The operator whose token is in the file; the deployment's own without one."""
    if token_file is None:
        return OPERATOR
    with tools.database.read() as session:
        return operators.actor_of(operators.find(session, token_file.read_text().strip())).id


HELP = "preview, post, confirm and list acts on money"
_TARGET = "a tenant (grant, plan, tax, address), a payment (refund) or an invoice"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    seen = verbs.add_parser("preview", help="show what an act would post; nothing is stored")
    seen.set_defaults(run=_preview)
    post = verbs.add_parser("post", help="post an act, or ask for a second operator's confirmation")
    post.set_defaults(run=_post)
    for each in (seen, post):
        each.add_argument("kind", choices=list(Kind))
        each.add_argument("target", help=_TARGET)
        each.add_argument("--amount", help="in major units; default: all that is open")
        each.add_argument("--reason", default="")
        each.add_argument("--reference", required=True, help="the same one is posted once")
        each.add_argument(
            "--term", action="append", default=[], metavar="NAME=VALUE", help="such as kind=promo"
        )
    listed = verbs.add_parser("list", help="list acts, the newest first")
    listed.add_argument("--status", choices=["waiting", "posted", "rejected"], default="")
    listed.set_defaults(run=_list)
    yes = verbs.add_parser("confirm", help="post an act that another operator asked for")
    yes.set_defaults(run=_confirm)
    no = verbs.add_parser("reject", help="reject or withdraw an act that waits")
    no.add_argument("--reason", default="")
    no.set_defaults(run=_reject)
    for each in (yes, no):
        each.add_argument("act", help="its id")
    month = verbs.add_parser("month-end", help="show a month's checklist, or sign the month off")
    month.add_argument("month", help="such as 2026-01, in UTC")
    month.add_argument("--sign", action="store_true")
    month.add_argument("--note", default="")
    month.set_defaults(run=_month_end)
    for each in (post, yes, no, month):
        each.add_argument(
            "--token-file", type=Path, metavar="FILE", help="act as the operator of this token"
        )
    for each in (seen, post, listed, yes, no, month):
        add_json(each)


def _asked(arguments: argparse.Namespace) -> ActRequest:
    terms: dict[str, Any] = {}
    for given in arguments.term:
        name, sign, value = given.partition("=")
        if not sign:
            raise BadRequest(f"--term {given} has no value.", next_step="Write it as kind=promo.")
        terms[name] = value
    kind = Kind(arguments.kind)
    prefix = "manual" if kind is Kind.WIRE else "cli"
    return ActRequest(
        kind,
        arguments.target,
        f"{prefix}:{arguments.reference}",
        units_of_amount(arguments.amount) if arguments.amount else None,
        arguments.reason,
        terms,
    )


def _preview(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        seen = money_acts.preview(session, tools.clock, _asked(arguments))
    currency = seen.subject.currency
    rows = [
        {
            "kind": each.kind,
            "account": each.account,
            "debit": decimal_of(each.units) if each.units > 0 else "",
            "credit": decimal_of(-each.units) if each.units < 0 else "",
            "currency": currency,
        }
        for each in seen.postings
    ]
    rows += [{"kind": "changes", "account": each} for each in seen.remarks]
    show(rows, as_json=arguments.json, title="postings")
    return 0


def _post(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        act = submit(tools, _asked(arguments), arguments.token_file)
    _show(act, arguments)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [
            money_acts.describe(each)
            for each in money_acts.listed(session, status=arguments.status, limit=500)
        ]
    if not arguments.json:
        names = ("id", "kind", "target", "status", "requested_by", "decided_by")
        rows = [
            {name: row[name] for name in names}
            | {"amount": f"{row['amount']['amount']} {row['amount']['currency']}"}
            for row in rows
        ]
    show(rows, as_json=arguments.json, title="acts")
    return 0


def _confirm(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        who = actor(tools, arguments.token_file)
        with tools.database.transaction() as session:
            act = money_acts.confirm(session, tools.clock, arguments.act, who)
        dunning.settle(tools.database, tools.clock)
    _show(act, arguments)
    return 0


def _reject(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        who = actor(tools, arguments.token_file)
        with tools.database.transaction() as session:
            act = money_acts.reject(session, tools.clock, arguments.act, who, arguments.reason)
    _show(act, arguments)
    return 0


def _month_end(arguments: argparse.Namespace) -> int:
    month = arguments.month
    with command_context() as tools:
        now = tools.clock.now()
        if arguments.sign:
            who = actor(tools, arguments.token_file)
            with tools.database.transaction() as session:
                month_end.sign(session, tools.clock, month, who, arguments.note)
        with tools.database.read() as session:
            checks = month_end.checklist(session, now, month_end.known_month(month, now))
            signed = [
                month_end.describe(session, each) for each in month_end.signatures(session, month)
            ]
    rows = [{"check": each.name, "state": each.state, "details": each.summary} for each in checks]
    if arguments.json:
        show({"month": month, "checklist": rows, "signatures": signed}, as_json=True)
    else:
        rows += [
            {"check": "Signed", "state": "", "details": f"{each['signed_by']}, {each['signed_at']}"}
            for each in signed
        ]
        show(rows, as_json=False, title=month)
    return 0


def _show(act: Any, arguments: argparse.Namespace) -> None:
    shown = money_acts.describe(act)
    if not arguments.json:
        names = ("id", "kind", "target", "status", "requested_by", "decided_by", "result")
        shown = {name: shown[name] for name in names}
    show(shown, as_json=arguments.json, title="act")
