"""`tollhouse price import` and `compare`: the prices of a list, and what they differ in."""

import argparse
from fractions import Fraction
from typing import Any

from billing.pricing import price_lists
from billing.pricing.price_lists import Listed
from billing.rating import price_imports
from billing.rating.price_imports import Change, Terms
from gateway.admin.console import ACTOR, CommandContext, command_context, text_of
from gateway.admin.output import add_json, say, show
from gateway.edge.decoding import parse_datetime


def add_price_lists(verbs: Any) -> None:
    load = verbs.add_parser("import", help="save the prices of a list, with a mark-up")
    compare = verbs.add_parser("compare", help="show what the prices of a list differ in")
    for each in (load, compare):
        each.add_argument("file", help="JSON of LiteLLM, of OpenRouter or ours; `-` is stdin")
        each.add_argument(
            "--model",
            action="append",
            default=[],
            metavar="NAME[=PUBLIC]",
            help="this model of the list, as the public name; may be repeated",
        )
        each.add_argument("--all", action="store_true", help="every model of the list")
        each.add_argument(
            "--markup", default="0", metavar="PERCENT", help="such as 20%%; a row's own comes first"
        )
        each.add_argument("--effective", metavar="DATE", help="from when; default: now")
        each.add_argument("--region", default="", help="of rows that have one")
        add_json(each)
    load.add_argument("--dry-run", action="store_true", help="show the changes without saving")
    load.set_defaults(run=_import)
    compare.set_defaults(run=_compare, dry_run=True)


def _listed(arguments: argparse.Namespace) -> list[Listed]:
    models = price_lists.named_models(arguments.model)
    text = text_of(arguments.file) if models or arguments.all else ""
    return price_lists.wanted(text, models, every=arguments.all, region=arguments.region)


def _terms(arguments: argparse.Namespace, tools: CommandContext) -> Terms:
    mark_up: Fraction = price_lists.percent_of(arguments.markup)
    start = parse_datetime(arguments.effective) if arguments.effective else tools.clock.now()
    note = f"imported from {arguments.file}, mark-up {arguments.markup.removesuffix('%')} %"
    return Terms(mark_up, start, note, ACTOR)


def _import(arguments: argparse.Namespace) -> int:
    listed = _listed(arguments)
    with command_context() as tools:
        terms = _terms(arguments, tools)
        if arguments.dry_run:
            with tools.database.read() as session:
                changes = price_imports.compare(session, listed, terms)
        else:
            with tools.database.transaction() as session:
                changes = price_imports.save(session, tools.clock, listed, terms)
    _show(changes, arguments)
    changed = sum(each.differs for each in changes)
    if not arguments.json:
        same = len(changes) - changed
        done = "would be saved; nothing was" if arguments.dry_run else "saved"
        say(f"{changed} new price versions {done}; {same} prices are as in the list.")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    listed = _listed(arguments)
    with command_context() as tools, tools.database.read() as session:
        changes = price_imports.compare(session, listed, _terms(arguments, tools))
    _show(changes, arguments)
    return 0


def _show(changes: list[Change], arguments: argparse.Namespace) -> None:
    described = price_imports.described(changes)
    if arguments.json:
        show(described, as_json=True)
        return
    show(described["changes"], as_json=False, title="changes")
    for model, fields in described["left_out"].items():
        say(f"{model}: left out, without a matching component: {', '.join(fields)}.")
