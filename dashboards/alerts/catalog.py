"""All alerts, in the order in which pages and rules list them."""

from dashboards.alerts.alert import Alert
from dashboards.alerts.engines import ENGINE_ALERTS
from dashboards.alerts.money import MONEY_ALERTS
from dashboards.alerts.service import SERVICE_ALERTS
from dashboards.alerts.usage import USAGE_ALERTS

ALERTS: tuple[Alert, ...] = (*SERVICE_ALERTS, *ENGINE_ALERTS, *USAGE_ALERTS, *MONEY_ALERTS)
