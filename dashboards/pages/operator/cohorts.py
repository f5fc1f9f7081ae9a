"""Cohorts: customers by the month of their first invoice, those still billed later, and their revenue."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.reports import cohorts
from billing.reports.cohorts import MONTHS, Cohort
from billing.reports.revenue import last_months
from core.money import units_of_minor
from dashboards import charts
from dashboards.filters import choice
from dashboards.formats import minor, money_label
from dashboards.heat_map import heat_map
from dashboards.page_data import Chart, Form, Input, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.pages.costs import amount_axis
from dashboards.render import svg
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/cohorts"
_AGES = [f"+{age}" for age in range(MONTHS)]
_LEAD = (
    "Customers by the month of their first invoice, and those with an invoice in the months after it. "
    "Final invoices before tax, without void ones; credit notes are not taken off."
)


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    now = deps.clock.now()
    with deps.database.report() as session:
        known = cohorts.currencies(session) or ["USD"]
        currency = choice(request, "currency", tuple(known), known[0])
        found = cohorts.read(session, currency, now)
    retained = _retained(found)
    if wants_csv(request):
        return retained.csv(f"cohorts-{currency}")
    page_data = PageData(
        "Cohorts",
        _LEAD,
        actions=[_form(known, currency)] if len(known) > 1 else [],
        tiles=_tiles(found, currency) if found else [],
        charts=_charts(found, currency, last_months(now, MONTHS)) if found else [],
        tables=[retained, _billed(found, currency)] if found else [retained],
    )
    return show(request, page_data)


def _form(known: Sequence[str], currency: str) -> Form:
    options = [(each, each) for each in known]
    chosen = Input("currency", "Currency", "select", currency, options)
    return Form(PATH, "Show", inputs=[chosen], method="get")


def _tiles(found: list[Cohort], currency: str) -> list[Tile]:
    billed = sum(amount or 0 for each in found for amount in each.billed)
    return [
        Tile("New customers", grouped(sum(each.size for each in found)), f"in {MONTHS} months"),
        Tile("Retained after 1 month", _kept(found, 1), about=_ABOUT),
        Tile("Retained after 3 months", _kept(found, 3), about=_ABOUT),
        Tile("Retained after 6 months", _kept(found, 6), about=_ABOUT),
        Tile("Billed to them", minor(billed, currency), "before tax"),
    ]


_ABOUT = "Of the customers of all cohorts that are old enough, those with an invoice in that month."


def _kept(found: list[Cohort], age: int) -> str:
    old = [each for each in found if each.customers[age] is not None]
    whole = sum(each.size for each in old)
    return f"{100 * sum(each.customers[age] or 0 for each in old) / whole:.0f} %" if whole else "–"


def _charts(found: list[Cohort], currency: str, months: list[str]) -> list[Chart]:
    rows = [(each.month, [each.retained(age) for age in range(MONTHS)]) for each in found]
    shares = heat_map("Share of each month's new customers that is billed later", rows, _AGES)
    names, series = months, _by_month(found, currency, months)
    title, value = f"Billed by cohort, {currency}", money_label(currency)
    stacked = charts.stacked_bars(title, names, series, amount_axis, value)
    return [
        Chart("Retained customers, % by months after the first invoice", svg(shares)),
        Chart(f"Billed by month and cohort, {currency}", svg(stacked)),
    ]


def _by_month(found: list[Cohort], currency: str, months: list[str]) -> list[charts.Series]:
    """The newest cohorts as series, the older ones as one, so that no colour repeats."""
    lines = []
    for each in found:
        before = [0] * months.index(each.month)
        amounts = [units_of_minor(amount or 0, currency) for amount in each.billed]
        lines.append(charts.Series(each.month, [*before, *amounts[: MONTHS - len(before)]]))
    if len(lines) <= charts.STYLES:
        return lines
    older, newer = lines[: 1 - charts.STYLES], lines[1 - charts.STYLES :]
    whole = [sum(each.values[index] for each in older) for index in range(MONTHS)]
    return [charts.Series(f"{older[-1].name} and before", whole), *newer]


def _retained(found: list[Cohort]) -> Table:
    columns = [Column("month", "First invoice"), *(_age(age, "whole") for age in range(MONTHS))]
    rows: list[dict[str, Any]] = [
        {"month": each.month, **dict(zip(_AGES, each.customers, strict=True))} for each in found
    ]
    return Table(
        "Customers billed, by months after the first invoice",
        columns,
        rows,
        totals=False,
        empty="No final invoices yet. They are made when a billing period has ended.",
        next_step=("/operator/invoices", "Open invoices"),
    )


def _billed(found: list[Cohort], currency: str) -> Table:
    columns = [Column("month", "First invoice"), *(_age(age, "minor") for age in range(MONTHS))]
    rows: list[dict[str, Any]] = [
        {"month": each.month, **dict(zip(_AGES, each.billed, strict=True))} for each in found
    ]
    return Table("Billed before tax, by months after it", columns, rows, currency, totals=False)


def _age(age: int, kind: Any) -> Column:
    return Column(_AGES[age], "Month 0" if age == 0 else _AGES[age], kind)


ROUTES = [Route(PATH, page_of)]
