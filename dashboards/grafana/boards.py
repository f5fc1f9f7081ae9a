"""The Grafana dashboards as code: `python -m dashboards.grafana.boards` writes the JSON files.

A panel is a title, a unit and its queries. A test compares the files with this module and the metric
names with the registries.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # a Grafana unit: short, s, percentunit, reqps
    queries: tuple[tuple[str, str], ...]  # (expression, legend)


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[{RATE}]))"


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    group = f"le, {by}" if by else "le"
    return tuple(
        (f"histogram_quantile(0.{q}, sum by ({group}) (rate({metric}_bucket[{RATE}])))", f"p{q}")
        for q in (50, 95, 99)
    )


DASHBOARDS: dict[str, tuple[Panel, ...]] = {
    "service": (
        Panel(
            "Responses by status",
            "reqps",
            ((_rate("tollhouse_requests_total", "status"), "{{status}}"),),
        ),
        Panel(
            "Error rate (SLO below 0.1 %)",
            "percentunit",
            (
                (
                    f'sum(rate(tollhouse_requests_total{{status=~"5.."}}[{RATE}])) '
                    f"/ sum(rate(tollhouse_requests_total[{RATE}]))",
                    "5xx",
                ),
            ),
        ),
        Panel(
            "Time to first token (SLO p95 below 300 ms)",
            "s",
            _quantiles("tollhouse_first_token_seconds"),
        ),
        Panel(
            "Goodput: share of first tokens within the SLO, 300 ms",
            "percentunit",
            (
                (
                    f'sum(rate(tollhouse_first_token_seconds_bucket{{le="0.3"}}[{RATE}])) '
                    f"/ sum(rate(tollhouse_first_token_seconds_count[{RATE}]))",
                    "within",
                ),
            ),
        ),
        Panel("Request duration", "s", _quantiles("tollhouse_request_seconds")),
        Panel("In flight", "short", (("sum(tollhouse_in_flight_requests)", "requests"),)),
        Panel(
            "Rejections by reason",
            "reqps",
            ((_rate("tollhouse_rejections_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Requests waiting for a limit",
            "short",
            (("sum(tollhouse_limit_queue_requests)", "waiting"),),
        ),
        Panel(
            "Mode of rate limits",
            "short",
            (("max(tollhouse_limit_mode)", "0 shared, 1 local, 2 closed"),),
        ),
        Panel(
            "Open circuit breakers",
            "short",
            (("max by (engine) (tollhouse_breaker_open)", "{{engine}}"),),
        ),
        Panel(
            "Retries on another replica",
            "reqps",
            ((_rate("tollhouse_retries_total", "reason"), "{{reason}}"),),
        ),
    ),
    "engine": (
        Panel(
            "Sequences",
            "short",
            (
                ("sum(tollhouse_engine_running)", "running"),
                ("sum(tollhouse_engine_waiting)", "waiting"),
            ),
        ),
        Panel("KV cache in use", "percentunit", (("max(tollhouse_engine_kv_usage)", "fullest"),)),
        Panel(
            "Prefix hit rate",
            "percentunit",
            (
                (
                    f"sum(rate(tollhouse_engine_prefix_hits_total[{RATE}])) "
                    f"/ sum(rate(tollhouse_engine_prefix_queries_total[{RATE}]))",
                    "hit rate",
                ),
            ),
        ),
        Panel(
            "Tokens per second",
            "short",
            (
                (f"sum(rate(tollhouse_engine_computed_tokens_total[{RATE}]))", "prompt, computed"),
                (f"sum(rate(tollhouse_engine_generated_tokens_total[{RATE}]))", "generated"),
            ),
        ),
        Panel(
            "Unbilled tokens",
            "short",
            (
                (f"sum(rate(tollhouse_engine_recomputed_tokens_total[{RATE}]))", "recomputed"),
                (f"sum(rate(tollhouse_engine_discarded_tokens_total[{RATE}]))", "discarded"),
            ),
        ),
        Panel("Step time", "s", _quantiles("tollhouse_engine_step_seconds")),
        Panel("Inter-token latency", "s", _quantiles("tollhouse_engine_inter_token_seconds")),
        Panel(
            "Adapters by state",
            "short",
            (("sum by (state) (tollhouse_engine_adapters)", "{{state}}"),),
        ),
        Panel(
            "Preemptions",
            "short",
            ((f"sum(rate(tollhouse_engine_preemptions_total[{RATE}]))", "per second"),),
        ),
    ),
    "billing": (
        Panel(
            "Tokens by kind",
            "short",
            ((_rate("tollhouse_tokens_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Spool records not yet shipped", "short", (("sum(tollhouse_spool_records)", "records"),)
        ),
        Panel(
            "Time since shipping started to fail",
            "s",
            (("max(tollhouse_spool_age_seconds)", "oldest"),),
        ),
        Panel("Run time of tasks", "s", _quantiles("tollhouse_task_seconds", "task")),
        Panel("Queue time of tasks", "s", _quantiles("tollhouse_queue_age_seconds", "queue")),
        Panel("Retries", "short", ((_rate("tollhouse_task_retries_total", "task"), "{{task}}"),)),
        Panel("Dead letters", "short", (("max(tollhouse_dead_letters_waiting)", "tasks"),)),
        Panel(
            "Age of the oldest unrated usage", "s", (("max(tollhouse_unrated_age_seconds)", "age"),)
        ),
        Panel("Age of the last audit", "s", (("max(tollhouse_audit_age_seconds)", "age"),)),
        Panel(
            "Parked spool records",
            "short",
            (
                ("sum(tollhouse_spool_parked_records)", "own"),
                ("sum(tollhouse_spool_parked_adopted_records)", "adopted"),
            ),
        ),
        Panel(
            "Audit differences (must be 0)",
            "short",
            (("max(tollhouse_audit_differences)", "differences"),),
        ),
        Panel("Parked events", "short", (("max(tollhouse_parked_events)", "events"),)),
    ),
    "safety": (
        Panel(
            "Moderation decisions",
            "reqps",
            (
                (
                    _rate("tollhouse_moderation_checks_total", "direction, action"),
                    "{{direction}} {{action}}",
                ),
            ),
        ),
        Panel(
            "Flagged categories",
            "reqps",
            ((_rate("tollhouse_moderation_flags_total", "category"), "{{category}}"),),
        ),
        Panel("Screening time", "s", _quantiles("tollhouse_moderation_seconds")),
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    return {
        "uid": f"tollhouse-{name}",
        "title": f"Tollhouse: {name}",
        "tags": ["tollhouse"],
        "timezone": "utc",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Data source",
                }
            ]
        },
        "panels": [_panel(panel, number) for number, panel in enumerate(DASHBOARDS[name])],
    }


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 8, "x": number % 3 * 8, "y": number // 3 * 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": expression, "legendFormat": legend, "datasource": source}
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }


def to_json(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (HERE / f"{each}.json").write_text(to_json(each))
