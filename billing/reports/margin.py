"""Margin: what usage earned and what the engines' time for it cost, by model, tenant and adapter.

The time is that of the engines' receipts: each request's share of the steps it was in. Idle time, and
servers that do not measure their steps, belong to nobody and are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.amounts import money
from billing.pricing.engine_prices import EnginePrices
from billing.pricing.exchange_rates import Converter
from billing.pricing.tables import EnginePrice
from billing.usage.tables import DailyEngineTime, DailyTenantUsage, DailyUsage
from core.errors import BadRequest
from core.money import round_half_away
from core.tenants.models import Tenant

DIMENSIONS = ("model", "tenant", "adapter")
_US_PER_HOUR = 3_600_000_000
_Key = tuple[str, ...]


@dataclass(slots=True)
class MarginRow:
    """Sums of a group. Amounts in picounits of the report's currency."""

    group: dict[str, str]  # dimension -> value; the adapter "" is none
    requests: int = 0
    tokens: int = 0  # input, including cached, and output
    revenue: int = 0  # charges and corrections, before tax and credit
    busy_us: int = 0
    unpriced_us: int = 0  # of it: of engines without a price
    cost: int = 0

    @property
    def margin(self) -> int:
        return self.revenue - self.cost


@dataclass(slots=True)
class MarginReport:
    currency: str
    by: tuple[str, ...]
    rows: list[MarginRow]  # the most earning first
    unpriced_us: dict[str, int] = field(default_factory=dict)  # by engine
    converter: Converter | None = None

    def chosen(self, table: Any) -> list[Any]:
        """The condition on the rows of a table with a currency."""
        return [] if self.converter else [table.currency == self.currency]

    def value(self, units: int, currency: str, day: datetime) -> int:
        return self.converter.convert(units, currency, day.date()) if self.converter else units

    def takes(self, price: EnginePrice) -> bool:
        return self.converter is not None or price.currency == self.currency

    @property
    def total(self) -> MarginRow:
        whole = MarginRow({})
        for row in self.rows:
            for name in ("requests", "tokens", "revenue", "busy_us", "unpriced_us", "cost"):
                setattr(whole, name, getattr(whole, name) + getattr(row, name))
        return whole


def read(
    session: Session,
    start: datetime,
    end: datetime,
    by: Sequence[str] = ("model",),
    currency: str = "USD",
    *,
    converter: Converter | None = None,
) -> MarginReport:
    """The margin of the days from `start` until before `end` of the tenants billed in `currency`. With
    a converter that of all tenants, in its currency, each day's amounts at the rate of the day."""
    dimensions = tuple(each for each in DIMENSIONS if each in by)
    unknown = [each for each in by if each not in DIMENSIONS]
    if unknown or not dimensions:
        raise BadRequest(
            f"The margin cannot be grouped by {', '.join(unknown)[:40] or 'nothing'}.",
            next_step=f"Use one or more of {', '.join(DIMENSIONS)}.",
            param="by",
        )
    report = MarginReport(converter.currency if converter else currency, dimensions, [])
    report.converter = converter
    rows: dict[_Key, MarginRow] = {}
    _add_revenue(session, report, rows, start, end)
    _add_cost(session, report, rows, start, end)
    report.rows = sorted(rows.values(), key=lambda row: (-row.revenue, list(row.group.values())))
    if "tenant" in dimensions:
        _name_tenants(session, report.rows)
    return report


def _add_revenue(
    session: Session,
    report: MarginReport,
    rows: dict[_Key, MarginRow],
    start: datetime,
    end: datetime,
) -> None:
    table: Any = DailyUsage if "adapter" in report.by else DailyTenantUsage
    group = _columns(table, report.by)
    tokens = table.input_tokens + table.output_tokens
    sums = [func.sum(each) for each in (table.requests, tokens, table.amount)]
    days = [table.at, table.currency] if report.converter else []
    query = select(*group, *sums, *days).where(
        table.at >= start, table.at < end, *report.chosen(table)
    )
    for found in session.execute(query.group_by(*group, *days)):
        row = _row_of(rows, report.by, tuple(found[: len(group)]))
        requests, tokens, amount = (int(each) for each in found[len(group) : len(group) + 3])
        if days:
            amount = report.value(amount, found[-1], found[-2])
        row.requests += requests
        row.tokens += tokens
        row.revenue += amount


def _add_cost(
    session: Session,
    report: MarginReport,
    rows: dict[_Key, MarginRow],
    start: datetime,
    end: datetime,
) -> None:
    prices, table = EnginePrices.load(session), DailyEngineTime
    group = _columns(table, report.by)
    query = (
        select(*group, table.at, table.engine_id, func.sum(table.busy_us))
        .where(table.at >= start, table.at < end, *report.chosen(table))
        .group_by(*group, table.at, table.engine_id)
    )
    spent: dict[_Key, int] = {}  # picounits × microseconds per hour: rounded once, per group
    for *key, day, engine_id, busy in session.execute(query):
        row, busy_us = _row_of(rows, report.by, tuple(key)), int(busy)
        row.busy_us += busy_us
        price = prices.at(engine_id, day)
        if price is None or not report.takes(price):
            row.unpriced_us += busy_us
            report.unpriced_us[engine_id] = report.unpriced_us.get(engine_id, 0) + busy_us
        else:
            amount = report.value(price.per_hour * busy_us, price.currency, day)
            spent[tuple(key)] = spent.get(tuple(key), 0) + amount
    for found, amount in spent.items():
        rows[found].cost = round_half_away(amount, _US_PER_HOUR)


def _columns(table: Any, by: tuple[str, ...]) -> list[Any]:
    return [table.tenant_id if each == "tenant" else getattr(table, each) for each in by]


def _row_of(rows: dict[_Key, MarginRow], by: tuple[str, ...], key: _Key) -> MarginRow:
    return rows.setdefault(key, MarginRow(dict(zip(by, key, strict=True))))


def _name_tenants(session: Session, rows: Sequence[MarginRow]) -> None:
    ids = {row.group["tenant"] for row in rows}
    names = dict(session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids))).all())
    for row in rows:
        row.group["tenant"] = names.get(row.group["tenant"], row.group["tenant"])


def seconds(microseconds: int) -> str:
    """`1234567` -> `1.234567`, exactly."""
    whole, rest = divmod(microseconds, 10**6)
    return f"{whole}.{rest:06d}"


def describe(report: MarginReport) -> dict[str, Any]:
    return {
        "object": "list",
        "currency": report.currency,
        "rates": report.converter.rates_used() if report.converter else [],
        "data": [_described(row, report.currency) for row in report.rows],
        "total": _described(report.total, report.currency),
        "unpriced_engines": [
            {"engine": engine_id, "engine_seconds": seconds(busy_us)}
            for engine_id, busy_us in sorted(report.unpriced_us.items())
        ],
    }


def _described(row: MarginRow, currency: str) -> dict[str, Any]:
    return {
        **row.group,
        "requests": row.requests,
        "tokens": row.tokens,
        "revenue": money(row.revenue, currency),
        "engine_seconds": seconds(row.busy_us),
        "unpriced_engine_seconds": seconds(row.unpriced_us),
        "engine_cost": money(row.cost, currency),
        "margin": money(row.margin, currency),
    }
