"""`tollhouse price`: exchange rates of the day, for reports in one currency."""

import argparse
from typing import Any

from billing.pricing import exchange_rates
from billing.pricing.exchange_rates import RateDraft
from gateway.admin.console.context import command_context
from gateway.admin.console.files import text_of
from gateway.admin.console.options import ACTOR
from gateway.admin.console.output import add_json, show


def add_exchange_rates(verbs: Any) -> None:
    save = verbs.add_parser("exchange-rate", help="record the exchange rate of a day")
    save.add_argument("base", help="such as EUR")
    save.add_argument("quote", help="such as USD")
    save.add_argument("rate", help="what one unit of the base is worth")
    save.add_argument("--day", metavar="DATE", help="UTC; default: today")
    save.set_defaults(run=_save)
    load = verbs.add_parser("exchange-import", help="record the rates of a CSV file, or none")
    load.add_argument("file", help="with the header day,base,quote,rate; `-` is stdin")
    load.set_defaults(run=_import)
    for each in (save, load):
        each.add_argument("--replace", action="store_true", help="rates that are recorded already")
    listing = verbs.add_parser("exchange-rates", help="list the exchange rates, newest first")
    listing.set_defaults(run=_list)
    for each in (save, load, listing):
        add_json(each)


def _save(arguments: argparse.Namespace) -> int:
    return _record(
        arguments,
        lambda today: [
            RateDraft(arguments.day or today, arguments.base, arguments.quote, arguments.rate)
        ],
    )


def _import(arguments: argparse.Namespace) -> int:
    drafts = exchange_rates.parse_csv(text_of(arguments.file))
    return _record(arguments, lambda _: drafts)


def _record(arguments: argparse.Namespace, drafts: Any) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        given = drafts(tools.clock.now().date().isoformat())
        rows = exchange_rates.record(session, tools.clock, given, ACTOR, replace=arguments.replace)
        shown = [exchange_rates.describe(each) for each in rows]
    show(shown, as_json=arguments.json, title="exchange rates")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [exchange_rates.describe(each) for each in exchange_rates.listed(session)]
    show(rows, as_json=arguments.json, title="exchange rates")
    return 0
