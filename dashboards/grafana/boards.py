"""Generates the Grafana boards of `panels.py` and the rules of the alerts:
python -m dashboards.grafana.boards"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dashboards.alerts import rules
from dashboards.grafana.panels import DASHBOARDS, Panel

HERE = Path(__file__).parent
_HEIGHTS = {"row": 1, "stat": 4}
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_LABELS = {"model": "model_name", "engine": "instance"}  # variable -> label of the engines' metrics
_COLUMNS = 24


def dashboard(name: str) -> dict[str, Any]:
    panels = DASHBOARDS[name]
    used = json.dumps([panel.queries for panel in panels])
    variables = [variable for variable in _LABELS if f"${variable}" in used]
    return {
        "uid": f"tollhouse-{name}",
        "title": f"Tollhouse: {name}",
        "tags": ["tollhouse"],
        "timezone": "utc",
        "schemaVersion": 39,
        "refresh": "30s",
        "graphTooltip": 1,  # one crosshair on all panels
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["tollhouse"], "title": "Boards", "keepTime": True},
            _link("Health", "/operator/health"),
        ],
        "templating": {
            "list": [
                {
                    "name": "source",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Data source",
                },
                {
                    "name": "site",
                    "type": "textbox",
                    "query": "http://127.0.0.1:8000",
                    "label": "Gateway",
                },
                *(_variable(each) for each in variables),
            ]
        },
        "panels": _placed(panels),
    }


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": _SOURCE,
        "query": f"label_values(tollhouse_engine_running, {_LABELS[name]})",
        "refresh": 2,  # when the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _link(title: str, page: str) -> dict[str, Any]:
    return {"type": "link", "title": title, "url": "${site}/dashboard" + page, "targetBlank": True}


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """From left to right; a panel that does not fit begins the next line."""
    found, x, y, line = [], 0, 0, 0
    for number, panel in enumerate(panels):
        height = _HEIGHTS.get(panel.kind, 8)
        if x + panel.width > _COLUMNS:
            x, y, line = 0, y + line, 0
        place = {"h": height, "w": panel.width, "x": x, "y": y}
        found.append({"id": number + 1, "gridPos": place, **_panel(panel)})
        x, line = x + panel.width, max(line, height)
    return found


def _panel(panel: Panel) -> dict[str, Any]:
    if panel.kind == "row":
        return {"type": "row", "title": panel.title, "collapsed": False, "panels": []}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, **_thresholds(panel)}
    if panel.kind == "timeseries" and panel.bad is not None:
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "links": [_link("Open the page", panel.page)] if panel.page else [],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, i) for i in range(len(panel.queries))],
    }


_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": _LAST, "colorMode": "background", "graphMode": "area"},
    "bargauge": {"reduceOptions": _LAST, "displayMode": "lcd", "orientation": "horizontal"},
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
        "yAxis": {"unit": "s"},
        "cellGap": 1,
        "tooltip": {"mode": "single", "yHistogram": True},
    },
}


def _thresholds(panel: Panel) -> dict[str, Any]:
    """Green, yellow from `warn`, red from `bad`; the other way round where `bad` is the smaller."""
    if panel.bad is None:
        return {}
    warn = panel.bad if panel.warn is None else panel.warn
    falling = panel.bad < warn
    steps: list[tuple[str, float | None]] = [("green", None), ("yellow", warn), ("red", panel.bad)]
    if falling:
        steps = [("red", None), ("yellow", panel.bad), ("green", warn)]
    elif warn == panel.bad:
        steps = [("green", None), ("red", panel.bad)]
    shown = [{"color": color, "value": value} for color, value in steps]
    return {
        "color": {"mode": "thresholds" if panel.kind != "timeseries" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": shown},
    }


def _target(panel: Panel, number: int) -> dict[str, Any]:
    expression, legend = panel.queries[number]
    return {
        "refId": chr(65 + number),
        "expr": expression,
        "legendFormat": legend or "__auto",
        "datasource": _SOURCE,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": panel.kind == "bargauge",
    }


def to_json(name: str) -> str:
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (HERE / f"{each}.json").write_text(to_json(each))
    (HERE / "alerts.yaml").write_text(rules.to_yaml())
