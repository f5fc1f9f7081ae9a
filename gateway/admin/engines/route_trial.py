"""`tollhouse model route`: where recorded requests would have gone by a virtual model, and at what cost.

Nothing is sent. What a request was about is not recorded, so conditions on tools and images hold for
none, and a conversation's requests are drawn one by one.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.engine import Row
from sqlalchemy.orm import Session

from billing.pricing.prices import load_price_book
from billing.pricing.pricing import Counts, PriceBook, PriceVersion, parts_of
from billing.usage.event_components import decode_components
from billing.usage.tables import UsageEventRow
from core.errors import BadRequest, NotFound
from core.events import Components, UsageKind
from core.money import decimal_of
from core.tenants.models import Tenant
from gateway.admin.console import command_context
from gateway.admin.output import show
from gateway.catalog.virtual_models import Facts, VirtualModel, read_virtual_models
from gateway.edge.decoding import parse_datetime
from gateway.engines.routing.canaries import point_of

_AT_ONCE = 5_000  # rows of a read
_DAYS = timedelta(days=7)  # by default the last
_NOWHERE = "no model of the pool"


def route(arguments: argparse.Namespace) -> int:
    pool = _pool_of(read_virtual_models(arguments.pools), arguments.virtual)
    with command_context() as tools:
        end = parse_datetime(arguments.end, "to") if arguments.end else tools.clock.now()
        start = parse_datetime(arguments.start, "from") if arguments.start else end - _DAYS
        if start >= end:
            raise BadRequest(
                f"The time from {start} to {end} is empty.",
                next_step="Swap the dates.",
                param="from",
            )
        with tools.database.read() as session:
            rows = trial(session, pool, arguments.model, start, end)
    show(rows, as_json=arguments.json, title=f"{arguments.model} as {pool.name}")
    return 0


def trial(
    session: Session, pool: VirtualModel, model: str, start: datetime, end: datetime
) -> list[dict[str, Any]]:
    """By chosen model and currency: requests, what they cost, and what they would have cost there;
    None where the chosen model has no price."""
    book = load_price_book(session)
    names = {row[0]: row[1] for row in session.execute(select(Tenant.id, Tenant.name))}
    sums: dict[tuple[str, str], list[int]] = {}
    unpriced: set[tuple[str, str]] = set()
    for row in _recorded(session, model, start, end):
        price = book.by_id.get(row.price_version)
        if price is None:
            continue
        counts = _counts_of(row)
        chosen = _chosen(pool, row, names, book, counts, price)
        key = (chosen or _NOWHERE, price.currency)
        total = sums.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += price.cost(counts)
        there = _price_at(book, chosen, row, price.currency) if chosen else None
        if there is None:
            unpriced.add(key)
        else:
            total[2] += there.cost(counts)
    return [
        {
            "model": key[0],
            "requests": count,
            "cost": decimal_of(before),
            "cost_there": None if key in unpriced else decimal_of(after),
            "currency": key[1],
        }
        for key, (count, before, after) in sorted(sums.items())
    ]


def _pool_of(pools: dict[str, VirtualModel], name: str) -> VirtualModel:
    if name in pools:
        return pools[name]
    if not name and len(pools) == 1:
        return next(iter(pools.values()))
    listed = ", ".join(pools) or "none"
    raise BadRequest(
        f"The pools have no virtual model {name!r}."
        if name
        else "Several virtual models are given.",
        next_step=f"Name one with --virtual: {listed}.",
        param="virtual",
    )


def _recorded(session: Session, model: str, start: datetime, end: datetime) -> Iterable[Row[Any]]:
    row = UsageEventRow
    query = select(
        *(row.request_id, row.tenant_id, row.labels, row.price_version, row.occurred_at),
        *(row.input_tokens, row.cached_tokens, row.output_tokens, row.waived_tokens),
        *(row.status, row.components),
    ).where(
        row.model == model,
        row.adapter.is_(None),
        row.kind == UsageKind.GENERATION,
        row.occurred_at >= start,
        row.occurred_at < end,
    )
    return session.execute(query.execution_options(yield_per=_AT_ONCE))


def _counts_of(row: Row[Any]) -> Counts:
    parts = decode_components(row.components) if row.components else Components()
    counts = Counts.of_answer(
        row.input_tokens - parts.input_tokens,
        row.cached_tokens,
        row.output_tokens - parts.output_tokens,
        row.waived_tokens,
        status=row.status,
    )
    return replace(counts, parts=parts_of(parts)) if row.components else counts


def _chosen(
    pool: VirtualModel,
    row: Row[Any],
    names: dict[str, str],
    book: PriceBook,
    counts: Counts,
    price: PriceVersion,
) -> str | None:
    facts = Facts(
        frozenset((row.tenant_id, names.get(row.tenant_id, ""))),
        frozenset(row.labels.split(",") if row.labels else ()),
        row.input_tokens,
        None,
        None,
    )

    def _cost(model: str) -> int | None:
        there = _price_at(book, model, row, price.currency)
        return there.cost(counts) if there is not None else None

    ranked = pool.ranked(facts, point_of(row.request_id, None, []), _cost)
    return ranked[0] if ranked else None


def _price_at(book: PriceBook, model: str, row: Row[Any], currency: str) -> PriceVersion | None:
    try:
        return book.pin(row.tenant_id, model, None, row.occurred_at, currency)
    except NotFound:
        return None
