"""`tollhouse price`: what engines cost, and the margin."""

import argparse
from datetime import timedelta
from typing import Any

from billing.pricing import engine_prices
from billing.pricing.exchange_rates import Converter
from billing.rating.rating_worker import rate_all
from billing.reports import margin
from billing.usage.service_rollups import sum_all
from core.errors import BadRequest
from gateway.admin.console import command_context
from gateway.admin.output import add_json, show
from gateway.edge.decoding import parse_datetime
from gateway.metering.spool_watch import wait_until_shipped


def add_engine_prices(verbs: Any) -> None:
    save = verbs.add_parser("engine", help="set what an hour of an engine costs you")
    save.add_argument("pool", help="a pattern of engines' names, such as h100-* or *")
    save.add_argument("--per-hour", required=True, metavar="AMOUNT", help="of one engine")
    save.add_argument("--currency", default="USD")
    save.add_argument("--from", dest="start", metavar="DATE", help="first day, UTC; default: today")
    save.add_argument("--note", default="")
    save.set_defaults(run=_save)
    listing = verbs.add_parser("engines", help="list what engines cost, newest first")
    listing.set_defaults(run=_list)
    report = verbs.add_parser("margin", help="show revenue less the cost of engine time")
    report.add_argument("--from", dest="start", metavar="DATE", help="first day; default: 30 days")
    report.add_argument("--to", dest="end", metavar="DATE", help="day after the last, UTC")
    report.add_argument(
        "--by", action="append", choices=margin.DIMENSIONS, help="repeatable; default: model"
    )
    report.add_argument("--currency", default="USD", help="of the tenants in the report")
    report.add_argument(
        "--reporting", metavar="CURRENCY", help="of all tenants, at the rates of the days"
    )
    report.set_defaults(run=_margin)
    for each in (save, listing, report):
        add_json(each)


def _save(arguments: argparse.Namespace) -> int:
    start = parse_datetime(arguments.start, "--from") if arguments.start else None
    draft = engine_prices.EnginePriceDraft(
        arguments.pool, arguments.per_hour, arguments.currency, start, arguments.note, "operator"
    )
    with command_context() as tools, tools.database.transaction() as session:
        shown = engine_prices.describe(engine_prices.save(session, tools.clock, draft))
    show(shown if arguments.json else _plain(shown), as_json=arguments.json, title="engine price")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [engine_prices.describe(each) for each in engine_prices.listed(session)]
    shown = rows if arguments.json else [_plain(each) for each in rows]
    show(shown, as_json=arguments.json, title="engine prices")
    return 0


def _margin(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        rate_all(tools.database, tools.clock)
        sum_all(tools.database, tools.clock)
        end = parse_datetime(arguments.end, "--to") if arguments.end else tools.clock.now()
        start = parse_datetime(arguments.start, "--from") if arguments.start else None
        start = start or end.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(29)
        if start >= end:
            raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
        with tools.database.read() as session:
            by = tuple(arguments.by or ("model",))
            converter = None
            if arguments.reporting:
                days = start.date(), (end - timedelta(microseconds=1)).date()
                converter = Converter.load(session, arguments.reporting, *days)
            currency = arguments.currency.upper()
            report = margin.read(session, start, end, by, currency, converter=converter)
    shown = margin.describe(report)
    if arguments.json:
        show(shown, as_json=True)
        return 0
    rows = [*shown["data"], dict.fromkeys(report.by, "total") | shown["total"]]
    show([_plain(each) for each in rows], as_json=False, title=f"margin in {report.currency}")
    return 0


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"{value['amount']} {value['currency']}" if isinstance(value, dict) else value
        for name, value in row.items()
    }
