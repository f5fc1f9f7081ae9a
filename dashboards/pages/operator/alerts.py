"""Alerts: each with its condition, whether it holds now where this page can know, and its runbook."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards.alerts.alert import Alert, Unit
from dashboards.alerts.catalog import ALERTS
from dashboards.alerts.conditions import Reading, figures, reading
from dashboards.alerts.rules import PAGE
from dashboards.page_data import PageData, Tile
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.render import page
from dashboards.scales import grouped
from dashboards.tables import Column, Table

COLUMNS = [
    Column("name", "Alert", link="href"),
    Column(
        "now",
        "Condition",
        "badge",
        "Whether it holds now. Prometheus raises the alert when it has held for the time given.",
    ),
    Column("value", "Measured", "figure"),
    Column("limit", "Raised", "figure"),
    Column("hold", "For", "figure"),
    Column("severity", "Severity"),
    Column("source", "Measured by", about="Other gateways and workers are not seen from here."),
]
_NO_VALUE = "–"


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    with deps.database.read() as session:
        found = figures(session, deps.clock.now(), deps.backend)
    readings = [(alert, reading(alert, found)) for alert in ALERTS]
    readings.sort(key=lambda pair: not pair[1].holds)  # what holds first, in the order of the rules
    table = Table("All alerts", COLUMNS, [_row(*pair) for pair in readings], totals=False)
    if wants_csv(request):
        return table.csv("alerts")
    holding = [alert for alert, each in readings if each.holds]
    unseen = sum(each.holds is None for _, each in readings)
    urgent = any(alert.severity == "critical" for alert in holding)
    page_data = PageData(
        "Alerts",
        "The rules that Prometheus gets, with their runbooks. It raises an alert; this page says which "
        "conditions hold at this moment, as far as this gateway can know.",
        tiles=[
            Tile("Hold now", grouped(len(holding)), state=_state(len(holding), urgent)),
            Tile("Clear", grouped(len(readings) - len(holding) - unseen)),
            Tile("Not evaluated here", grouped(unseen), "ask Prometheus"),
        ],
        tables=[table],
    )
    alerts = [(alert, {"state": _words(each)}) for alert, each in readings]
    return page(request, "alerts.html", page_data=page_data, alerts=alerts)


def _row(alert: Alert, each: Reading) -> dict[str, Any]:
    words = {"!=": "not ", "==": ""}.get(alert.compare, f"{alert.compare} ")
    return {
        "name": alert.name,
        "href": f"#{alert.name}",
        "now": _words(each),
        "value": _figure(each.value, alert.unit),
        "limit": words + _figure(alert.limit, alert.unit) if alert.compare else _NO_VALUE,
        "hold": alert.hold or "at once",
        "severity": alert.severity,
        "source": each.source,
    }


def _words(each: Reading) -> str:
    if each.holds is None:
        return "not evaluated here"
    return "holds" if each.holds else "clear"


def _state(holding: int, urgent: bool) -> str:
    return ("bad" if urgent else "warn") if holding else "good"


def _figure(value: float | None, unit: Unit) -> str:
    if value is None:
        return _NO_VALUE
    if unit == "share":
        return f"{100 * value:.4g} %"
    if unit == "seconds":
        return f"{value:,.0f} s" if value >= 10 else f"{1000 * value:,.0f} ms"
    return f"{value:g}"


ROUTES = [Route(PAGE, page_of)]
