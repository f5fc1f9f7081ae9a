"""The alerts as Prometheus' rules, which `python -m dashboards.grafana.boards` writes."""

import json

from dashboards.alerts.alert import Alert
from dashboards.alerts.catalog import ALERTS

PAGE = "/operator/alerts"
# Prometheus fills it in: an external label of its configuration. The chart puts the URL in its place.
SITE = "{{ $externalLabels.tollhouse_url }}"


def to_yaml() -> str:
    """JSON's strings are YAML's too, so nothing needs to be escaped by hand."""
    return "groups:\n  - name: tollhouse\n    rules:\n" + "".join(_rule(each) for each in ALERTS)


def _rule(alert: Alert) -> str:
    annotations = {
        "summary": alert.summary,
        "action": alert.action,
        "runbook_url": f"{SITE}/dashboard{PAGE}#{alert.name}",
    }
    lines = [f"- alert: {alert.name}", f"  expr: {json.dumps(alert.condition)}"]
    lines += [f"  for: {alert.hold}"] if alert.hold else []
    lines += [f"  labels: {{severity: {alert.severity}}}", "  annotations:"]
    lines += [f"    {name}: {json.dumps(text)}" for name, text in annotations.items()]
    return "".join(f"      {line}\n" for line in lines)
