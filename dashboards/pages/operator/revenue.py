"""Revenue: billed, collected, outstanding by age, credits, refunds and prepaid balances."""

from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.pricing.exchange_rates import Converter
from billing.reports import revenue
from billing.usage.day_range import Range
from core.money import units_of_minor
from core.tenants.models import Tenant
from dashboards import charts
from dashboards.filters import date_range
from dashboards.formats import minor, money, money_label
from dashboards.page_data import Chart, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, root_of, wants_csv
from dashboards.pages.costs import amount_axis
from dashboards.pages.operator.exchange_rates import rates_tables, reporting_input
from dashboards.render import svg
from dashboards.tables import Column, Table

PATH = "/operator/revenue"
ABOUT = {
    "used": "Charges for usage in this period, invoiced or not, before tax and credits.",
    "billed": "Totals of invoices finalised in this period, including tax, without void ones.",
    "collected": "Payments settled in this period, including credit top-ups.",
    "outstanding": "Open amounts of final invoices, as of now.",
    "credited": "Credit notes issued in this period, including tax.",
    "refunded": "Refunds in this period.",
    "failed": "Failed collection attempts in this period.",
    "given": "Promotional credit granted in this period.",
    "deferred": "Prepaid credit not yet used, as of now.",
}
_COLUMNS = [
    Column("currency", "Currency"),
    *(
        Column(
            key,
            key.capitalize(),
            "money" if key in ("used", "given", "deferred") else "minor",
            about,
        )
        for key, about in ABOUT.items()
    ),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    now = deps.clock.now()
    span = date_range(request, now, now.day)
    reporting = request.query_params.get("reporting", "").strip()
    with deps.database.report() as session:
        found = revenue.read(session, span)
        converter = None
        if reporting:
            last = min(span.last, now.date())
            converter = Converter.load(session, reporting, span.first, span.last)
            whole = revenue.read_in(session, Range(span.first, last), converter)
        debtors = revenue.outstanding(session, now)
        main = found[0] if found else revenue.Revenue("USD")
        months = revenue.by_month(session, main.currency, now)
        ids = [each.tenant_id for each in debtors]
        rows = session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids)))
        names = {row[0]: row[1] for row in rows}
    shown = [whole] if converter else found
    table = Table(
        f"Revenue in {converter.currency}" if converter else "Revenue by currency",
        _COLUMNS,
        [{column.key: getattr(each, column.key) for column in _COLUMNS} for each in shown],
        totals=False,
        empty="No usage, invoices or payments yet.",
    )
    if wants_csv(request):
        return table.csv(f"revenue-{span.first}-{span.last}")
    root = root_of(request)
    page_data = PageData(
        "Revenue",
        "Each amount at the rate of its day, balances at that of the last day."
        if converter
        else "Currencies are not converted. The tiles show the currency with the most revenue.",
        span=span,
        narrow=[reporting_input(reporting)],
        tiles=_tiles(whole if converter else main),
        charts=[_chart(main.currency, months)] if any(map(any, months.values())) else [],
        tables=[table, *rates_tables(converter), _ages(debtors, names, root)],
    )
    return show(request, page_data)


def _tiles(main: revenue.Revenue) -> list[Tile]:
    words = main.currency
    return [
        Tile("Used", money(main.used, words), about=ABOUT["used"]),
        Tile("Billed", minor(main.billed, words), about=ABOUT["billed"]),
        Tile("Collected", minor(main.collected, words), about=ABOUT["collected"]),
        Tile("Outstanding", minor(main.outstanding, words), about=ABOUT["outstanding"]),
        Tile("Prepaid balance", money(main.deferred, words), about=ABOUT["deferred"]),
    ]


def _chart(currency: str, months: dict[str, list[int]]) -> Chart:
    series = [
        charts.Series(name, [units_of_minor(pair[index], currency) for pair in months.values()])
        for index, name in enumerate(("billed", "collected"))
    ]
    value = money_label(currency)
    drawn = charts.lines(f"By month, {currency}", list(months), series, amount_axis, value)
    return Chart(f"Billed and collected by month, {currency}", svg(drawn))


def _ages(debtors: list[revenue.Debtor], names: dict[str, str], root: str) -> Table:
    columns = [
        Column("tenant", "Tenant", link="href"),
        *(
            Column(age[0], f"{age[0]}{' days overdue' if age[1] else ''}", "minor")
            for age in revenue.AGES
        ),
        Column("total", "Total", "minor"),
    ]
    rows: list[dict[str, Any]] = [
        {
            "tenant": names.get(each.tenant_id, each.tenant_id),
            "href": f"{root}/operator/tenants/{each.tenant_id}",
            "currency": each.currency,
            "total": each.total,
            **each.by_age,
        }
        for each in debtors
    ]
    caption = "Outstanding by age, in days past due"
    return Table(caption, columns, rows, totals=False, empty="All final invoices are paid.")


ROUTES = [Route(PATH, page_of)]
