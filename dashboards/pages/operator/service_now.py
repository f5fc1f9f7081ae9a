"""What Health shows besides its components: the service in the last hour, engines, alerts that hold now,
errors by cause and the latest audits."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.audit.tables import AuditRun
from dashboards import charts, traffic
from dashboards.alerts.alert import Alert
from dashboards.alerts.catalog import ALERTS
from dashboards.alerts.conditions import figures, reading
from dashboards.alerts.rules import PAGE as ALERTS_PAGE
from dashboards.backend import EngineView
from dashboards.page_data import Tile
from dashboards.pages.operator import reconciliation
from dashboards.pages.operator import traffic as traffic_page
from dashboards.pages.operator.engines import PATH as ENGINES_PAGE
from dashboards.render import svg
from dashboards.scales import grouped
from dashboards.tables import Column, Table
from dashboards.viewer import DashboardDeps

_PERIOD = timedelta(hours=1)
_OBJECTIVE = Decimal("99.9")  # percent, as on Traffic without another
_AUDITS = 5
_ALERTS = [
    Column("name", "Alert", link="href"),
    Column("severity", "Severity"),
    Column("summary", "What is wrong"),
    Column("action", "What to do"),
]


@dataclass(frozen=True, slots=True)
class ServiceNow:
    rows: Sequence[traffic.TrafficRow]  # of the last hour
    engines: Sequence[EngineView]
    holding: Sequence[Alert]
    audits: Sequence[AuditRun]  # the newest first


def read(session: Session, deps: DashboardDeps, now: datetime) -> ServiceNow:
    found = figures(session, now, deps.backend)
    holding = [alert for alert in ALERTS if reading(alert, found).holds]
    runs = select(AuditRun).order_by(AuditRun.id.desc()).limit(_AUDITS)
    return ServiceNow(
        traffic.read(session, now - _PERIOD, now),
        list(deps.backend.engines()),
        holding,
        session.scalars(runs).all(),
    )


def tiles(found: ServiceNow, root: str) -> list[Tile]:
    """Is it well, and where does it hurt: each leads to the page that says more."""
    whole = traffic.total(found.rows)
    hour = f"{root}{traffic_page.PATH}?period=1h"
    engines, count = f"{root}{ENGINES_PAGE}", len(found.holding)
    used = sum(each.blocks_used for each in found.engines)
    blocks = sum(each.blocks_total for each in found.engines)
    urgent = any(alert.severity == "critical" for alert in found.holding)
    state = ("bad" if urgent else "warn") if count else "good"
    kept = (traffic_page.burn_tile(whole, _OBJECTIVE), *traffic_page.speed_tiles(whole, _PERIOD))
    return [
        Tile("Alerts", grouped(count), "hold now", state=state, href=f"{root}{ALERTS_PAGE}"),
        *(_linked(each, hour) for each in kept),
        Tile(
            "Waiting",
            grouped(sum(each.waiting for each in found.engines)),
            "sequences, all engines",
            href=engines,
        ),
        Tile(
            "KV in use",
            f"{100 * used / blocks:.1f} %" if blocks else "–",
            href=engines,
            meter=svg(charts.meter("KV blocks in use", used, blocks)) if blocks else "",
        ),
    ]


def _linked(tile: Tile, href: str) -> Tile:
    return Tile(tile.title, tile.value, tile.note, tile.about, tile.state, href)


def tables(found: ServiceNow, root: str) -> list[Table]:
    alerts = [
        {
            "name": each.name,
            "href": f"{root}{ALERTS_PAGE}#{each.name}",
            "severity": each.severity,
            "summary": each.summary,
            "action": each.action,
        }
        for each in found.holding
    ]
    return [
        Table(
            "Alerts that hold now",
            _ALERTS,
            alerts,
            totals=False,
            empty="None, as far as this gateway can know.",
        ),
        traffic_page.causes_table(found.rows, "Errors by cause, last hour"),
        reconciliation.runs_table(found.audits, "Latest audits"),
    ]
