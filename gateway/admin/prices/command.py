"""`tollhouse price`: sets, lists, compares and tries prices; re-rates past usage; costs of engines."""

import argparse
import json
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from billing.amounts import money
from billing.invoicing.views import price_json
from billing.pricing import exchange_rates, price_terms, prices
from billing.pricing.exchange_rates import RateDraft
from billing.pricing.pricing import PARTS, PRICED_AS, TOKENS, Component, Counts, parts_of
from billing.pricing.tables import PriceVersionRow
from billing.rating import price_changes, rerating
from core.errors import BadRequest
from core.events import Components
from core.money import decimal_of
from gateway.admin.console import ACTOR, CommandContext, command_context, tenant_id_of, text_of
from gateway.admin.engines.prices import add_engine_prices
from gateway.admin.output import add_json, say, show
from gateway.admin.prices.lists import add_price_lists
from gateway.edge.decoding import parse_datetime


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
    listing.set_defaults(run=_list_rates)
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


def _list_rates(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [exchange_rates.describe(each) for each in exchange_rates.listed(session)]
    show(rows, as_json=arguments.json, title="exchange rates")
    return 0


HELP = "set, list, import, compare and try prices; re-rate past usage"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    save = verbs.add_parser("set", help="save a price, after a trial on sample usage")
    _draft_options(save)
    save.set_defaults(run=_set)
    trial = verbs.add_parser("try", help="calculate a cost with a price, without saving it")
    _draft_options(trial)
    trial.add_argument("--prompt-tokens", type=int, default=1_000_000)
    trial.add_argument("--cached-tokens", type=int, default=0)
    trial.add_argument("--output-tokens", type=int, default=1_000_000)
    for component in PARTS:
        name = component.value.replace("_", "-")
        unit = "tokens" if component in TOKENS else "count"
        trial.add_argument(
            f"--used-{name}",
            dest=f"used_{component.value}",
            type=int,
            default=0,
            metavar="N",
            help=f"{unit}, of the totals" if component in TOKENS else unit,
        )
    trial.set_defaults(run=_try)
    listing = verbs.add_parser("list", help="list price versions, newest first")
    listing.add_argument("--model")
    listing.set_defaults(run=_list)
    compare = verbs.add_parser("diff", help="compare two versions, component by component")
    compare.add_argument("version")
    compare.add_argument("other")
    compare.set_defaults(run=_diff)
    rerate = verbs.add_parser("rerate", help="re-rate past usage of one price version with another")
    rerate.add_argument("--version", required=True, help="the wrong version, pinned on the usage")
    rerate.add_argument("--by", required=True, help="the right version")
    rerate.add_argument("--from", dest="start", required=True, metavar="DATE")
    rerate.add_argument("--to", dest="end", metavar="DATE", help="default: now")
    rerate.add_argument("--tenant", help="name or id; default: all tenants")
    rerate.add_argument("--reason", default="", help="shown on the invoice")
    rerate.add_argument(
        "--dry-run", action="store_true", help="show the difference without posting"
    )
    rerate.set_defaults(run=_rerate)
    add_engine_prices(verbs)
    add_price_lists(verbs)
    add_exchange_rates(verbs)
    for each in (save, trial, listing, compare, rerate):
        add_json(each)


def _draft_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="public name, or * for every model")
    parser.add_argument("--adapter", default="*", help="only with this adapter; default: any")
    parser.add_argument("--tenant", help="a tenant's negotiated price; default: the list price")
    parser.add_argument("--currency", default="USD")
    parser.add_argument("--from", dest="start", metavar="DATE", help="default: now")
    parser.add_argument("--to", dest="end", metavar="DATE", help="default: open-ended")
    parser.add_argument("--discount", default="0", metavar="PERCENT")
    parser.add_argument("--note", default="")
    for component in Component:
        unit = "per million tokens" if component in TOKENS else "each"
        unit = "per million characters" if component is Component.CHARACTER else unit
        name = component.value.replace("_", "-")
        parser.add_argument(
            "--adapter-request" if component is Component.ADAPTER else f"--{name}",
            dest=f"price_{component.value}",
            metavar="PRICE",
            help=f"in major units, {unit}; or JSON with scheme and tiers; none removes it"
            f"{_fallback(component)}",
        )


def _fallback(component: Component) -> str:
    """What a part costs without a price of its own."""
    if component in PRICED_AS:
        return f"; without it, as {PRICED_AS[component].value.replace('_', '-')}"
    return "; free without it" if component in PARTS else ""


def _draft(tools: CommandContext, arguments: argparse.Namespace) -> prices.PriceDraft:
    terms: dict[str, Any] = {}
    for component in Component:
        value = getattr(arguments, f"price_{component.value}")
        if value is not None:
            terms[component.value] = _price(component.value, value)
    tenant_id = ""
    if arguments.tenant:
        with tools.database.read() as session:
            tenant_id = tenant_id_of(session, arguments.tenant)
    return prices.PriceDraft(
        arguments.model,
        terms,
        parse_datetime(arguments.start) if arguments.start else tools.clock.now(),
        parse_datetime(arguments.end) if arguments.end else None,
        tenant_id,
        arguments.adapter,
        arguments.currency,
        arguments.discount,
        arguments.note,
        "operator",
    )


def _price(component: str, value: str) -> Any:
    if value == "none":
        return None
    if not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRequest(
            f"--{component} is not JSON: {error}.",
            next_step="Give an amount, or JSON with scheme and tiers.",
        ) from None


def _set(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        draft = _draft(tools, arguments)
        with tools.database.transaction() as session:
            stays = price_changes.kept(session, draft)
            version = price_changes.save(session, tools.clock, draft)
        if stays and not arguments.json:
            names = ", ".join(sorted(each.value for each in stays))
            say(f"Kept from the version before: {names}. Give `none` to remove a rate.")
        with tools.database.read() as session:
            row = session.get_one(PriceVersionRow, version.id)
            shown = price_json(row) if arguments.json else _short(row)
            show(shown, as_json=arguments.json, title="price")
    return 0


def _try(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        draft = _draft(tools, arguments)
        written = {name: each for name, each in draft.written.items() if each is not None}
        version = prices.validate(replace(draft, written=written))
    used = Components(**{each.value: getattr(arguments, f"used_{each.value}") for each in PARTS})
    given = arguments.prompt_tokens - arguments.cached_tokens
    if used != used.within(given, arguments.output_tokens):
        raise BadRequest(
            f"The parts have more than {given} uncached input or {arguments.output_tokens} output"
            " tokens.",
            next_step="Raise --prompt-tokens and --output-tokens: the parts are parts of them.",
        )
    answer = Counts.of_answer(
        arguments.prompt_tokens - used.input_tokens,
        arguments.cached_tokens,
        arguments.output_tokens - used.output_tokens,
    )
    counts = replace(answer, parts=parts_of(used))
    parts = {
        component.value: money(version.total(component, quantity), version.currency)
        for component, quantity in version.priced(counts)
        if quantity
    }
    total = money(version.cost(counts), version.currency)
    if arguments.json:
        show({"components": parts, "total": total}, as_json=True)
        return 0
    shown = {name: f"{part['amount']} {part['currency']}" for name, part in parts.items()}
    show({**shown, "total": f"{total['amount']} {total['currency']}"}, as_json=False, title="cost")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = select(PriceVersionRow).order_by(
            PriceVersionRow.model, PriceVersionRow.effective_from.desc()
        )
        if arguments.model:
            query = query.where(PriceVersionRow.model == arguments.model)
        rows = list(session.scalars(query))
        if arguments.json:
            show([price_json(row) for row in rows], as_json=True)
            return 0
        show([_short(row) for row in rows], as_json=False, title="prices")
    return 0


def _short(row: PriceVersionRow) -> dict[str, Any]:
    rates, discount_ppm = price_terms.load(row.terms)
    words = {each: price_terms.in_words(each, rate) for each, rate in rates.items()}
    named = (Component.INPUT, Component.CACHED_INPUT, Component.OUTPUT)
    others = [f"{each.value} {text}" for each, text in words.items() if each not in named]
    return {
        "id": row.id,
        "model": row.model,
        "adapter": row.adapter,
        "tenant": row.tenant_id or "list",
        "from": f"{row.effective_from:%Y-%m-%d}",
        "to": f"{row.effective_to:%Y-%m-%d}" if row.effective_to else "open",
        "currency": row.currency,
        **{each.value: words.get(each, "-") for each in named},
        "others": "; ".join(others) or "-",
        "discount": f"{decimal_of(discount_ppm * 10**8)} %" if discount_ppm else "-",
    }


def _diff(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        one = prices.get_version(session, arguments.version)
        other = prices.get_version(session, arguments.other)
    rows = []
    for component in Component:
        before, after = one.rates.get(component), other.rates.get(component)
        if before != after or one.discount_ppm != other.discount_ppm:
            cost = [version.total(component, 1_000_000) for version in (one, other)]
            if before is None and after is None:
                continue
            rows.append(
                {
                    "component": component.value,
                    "a million before": decimal_of(cost[0]),
                    "a million after": decimal_of(cost[1]),
                    "difference": decimal_of(cost[1] - cost[0]),
                }
            )
    show(rows, as_json=arguments.json, title="differences")
    return 0


def _rerate(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with tools.database.read() as session:
            tenant_id = tenant_id_of(session, arguments.tenant) if arguments.tenant else ""
        request = rerating.Request(
            arguments.version,
            arguments.by,
            parse_datetime(arguments.start),
            parse_datetime(arguments.end) if arguments.end else tools.clock.now(),
            tenant_id,
            arguments.reason,
            "operator",
        )
        if arguments.dry_run:
            with tools.database.read() as session:
                changes = rerating.plan(session, request)
        else:
            with tools.database.transaction() as session:
                changes = rerating.post_all(session, tools.clock, request)
    rows = [
        {
            "tenant_id": each.tenant_id,
            "component": each.component.value,
            "quantity": each.quantity,
            "before": decimal_of(each.before),
            "after": decimal_of(each.after),
            "difference": decimal_of(each.difference),
            "currency": each.currency,
        }
        for each in changes
    ]
    show(rows, as_json=arguments.json, title="differences")
    say("Nothing was posted." if arguments.dry_run else f"Adjustments posted: {len(rows)}.")
    return 0
