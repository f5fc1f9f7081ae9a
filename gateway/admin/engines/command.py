"""`tollhouse engine`: runs an engine worker. The options are those of `engine.worker.server`.

Only `--model` and `--draft-model` are read here: a hub id or short name is resolved to a path, and
fetched, before the engine starts. Without them, TOLLHOUSE_MODEL and TOLLHOUSE_DRAFT_MODEL say which
models they are, and TOLLHOUSE_DRAFT_HEADS which heads guess.
"""

import argparse
import json
import urllib.request
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError, URLError

from billing.pricing import engine_prices
from billing.pricing.exchange_rates import Converter
from billing.rating.rating_worker import rate_all
from billing.reports import margin
from billing.usage.service_rollups import sum_all
from core.data_dir import private_files
from core.errors import BadRequest, Conflict, Unavailable
from core.settings import load_settings
from core.tenants.operator import operator_token
from gateway.admin.console import command_context
from gateway.admin.output import add_json, show
from gateway.catalog.model_files import DEMO_NAME
from gateway.catalog.model_source import locate
from gateway.edge.decoding import parse_datetime
from gateway.metering.spool_watch import wait_until_shipped
from gateway.serving.record import url_here

_PATH = "/admin/v1/engines/upstreams"
_TIMEOUT_S = 60.0


def reload(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    url, token = arguments.url or url_here(settings), operator_token(settings)
    found = _ask(url, token, _PATH)
    if found["changes"] and not arguments.dry_run:
        found = _ask(url, token, f"{_PATH}/reload", {"digest": found["digest"]})
    if arguments.json:
        show(found, as_json=True, title="upstreams")
        return 0
    rows = [{**each, "fields": ", ".join(each["fields"])} for each in found["changes"]]
    title = "would change" if arguments.dry_run else "changed"
    show(rows, as_json=False, title=title if rows else f"{found['file']}: nothing to change")
    return 0


def _ask(url: str, token: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        raise Conflict(_message(error.read())) from None
    except (URLError, OSError) as error:
        raise Unavailable(
            f"No gateway answers at {url}: {error}.",
            next_step="Start one with `tollhouse serve`, or give its address with --url.",
        ) from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


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


HELP = "run an engine worker; `tollhouse engine --help` shows its options"

_NAMED = ("--model", "--draft-model")


def main(options: list[str]) -> int:
    from engine.worker.server import main as serve

    with private_files():  # of receipts and of cached prompts
        return serve(with_model_path(options))


def with_model_path(options: list[str]) -> list[str]:
    """The same options with the paths of the models' files."""
    from gateway.catalog.checkpoint import check_servable
    from gateway.catalog.model_source import locate_draft

    if {"--help", "-h", "--fake"} & set(options):
        return options
    settings = load_settings()
    taken = _taken(options)
    if taken is None:  # argparse says what is wrong
        return options
    rest, values = taken
    named = values.get("--model")
    model = settings.model if named is None else named
    path = locate("" if model == DEMO_NAME else model, settings.data_dir)
    check_servable(path)
    draft = locate_draft(
        settings.model_copy(
            update={"draft_model": values.get("--draft-model", settings.draft_model)}
        )
    )
    drafting = [] if draft is None else ["--draft-model", str(draft)]
    if settings.draft_heads != "auto" and not any(_is_heads(each) for each in rest):
        drafting += ["--draft-heads", settings.draft_heads]
    return ["--model", str(path), *drafting, *rest]


def _is_heads(option: str) -> bool:
    return option.partition("=")[0] == "--draft-heads"


def _taken(options: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """The options without those that name models, and these; None where a value is missing."""
    rest: list[str] = []
    named: dict[str, str] = {}
    left = iter(options)
    for each in left:
        name, equals, value = each.partition("=")
        if name not in _NAMED:
            rest.append(each)
        elif equals:
            named[name] = value
        else:
            given = next(left, None)
            if given is None:
                return None
            named[name] = given
    return rest, named
