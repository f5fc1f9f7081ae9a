"""The panels of the Grafana boards. The first row of a board answers whether all is well; the rows below
show where it is not, by model and engine."""

from dataclasses import dataclass
from typing import Literal

RATE = "$__rate_interval"
SERVED = '{model=~"$model"}'  # of the gateway's metrics
ENGINE = '{model_name=~"$model", instance=~"$engine"}'
INSTANCE = '{instance=~"$engine"}'
Kind = Literal["timeseries", "stat", "heatmap", "bargauge", "row"]
Queries = tuple[tuple[str, str], ...]  # (expression, legend)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str = "short"  # a Grafana unit: short, s, percentunit, reqps
    queries: Queries = ()
    kind: Kind = "timeseries"
    warn: float | None = None  # from here yellow
    bad: float | None = None  # from here red; below `warn`, small values are the bad ones
    page: str = ""  # the dashboard's page behind it
    width: int = 8


def _row(title: str) -> Panel:
    return Panel(title, kind="row", width=24)


def _stat(
    title: str, unit: str, expression: str, warn: float | None, bad: float | None, page: str
) -> Panel:
    return Panel(title, unit, ((expression, ""),), "stat", warn, bad, page, width=4)


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{where}[{RATE}]))"


def _sum(metric: str, where: str = "") -> str:
    return f"sum(rate({metric}{where}[{RATE}]))"


def _quantiles(metric: str, where: str = "", by: str = "") -> Queries:
    group = f"le, {by}" if by else "le"
    name = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (f"histogram_quantile(0.{q}, {_rate(f'{metric}_bucket', group, where)})", f"{name}p{q}")
        for q in ((95,) if by else (50, 95, 99))
    )


def _heat(title: str, metric: str, where: str = "") -> Panel:
    query = _rate(f"{metric}_bucket", "le", where)
    return Panel(title, "s", ((query, "{{le}}"),), "heatmap", width=12)


def _share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


_FIRST = "tollhouse_first_token_seconds"
_GOODPUT = _share(
    _sum(f"{_FIRST}_bucket", '{model=~"$model", le="0.3"}'), _sum(f"{_FIRST}_count", SERVED)
)
_ERRORS = _share(
    _sum("tollhouse_requests_total", '{status=~"5.."}'), _sum("tollhouse_requests_total")
)
_HITS = _share(
    _sum("tollhouse_engine_prefix_hits_total", ENGINE),
    _sum("tollhouse_engine_prefix_queries_total", ENGINE),
)
_HEALTH = "/operator/health"
_ENGINES = "/operator/engines"

SERVICE = (
    _stat("Error rate", "percentunit", _ERRORS, 0.0005, 0.001, "/requests?q=status:5xx"),
    _stat("Goodput", "percentunit", _GOODPUT, 0.98, 0.95, _ENGINES),
    _stat(
        "First token, p95",
        "s",
        f"histogram_quantile(0.95, {_rate(f'{_FIRST}_bucket', 'le', SERVED)})",
        0.2,
        0.3,
        _ENGINES,
    ),
    _stat(
        "Error budget burn",
        "short",
        "(" + _ERRORS.replace(RATE, "1h") + ") / 0.001",
        1,
        14.4,
        _HEALTH,
    ),
    _stat("Open breakers", "short", "sum(tollhouse_breaker_open)", 1, 1, _ENGINES),
    _stat("Rate limits", "short", "max(tollhouse_limit_mode)", 1, 2, _HEALTH),
    _row("Traffic"),
    Panel(
        "Responses by status",
        "reqps",
        ((_rate("tollhouse_requests_total", "status"), "{{status}}"),),
    ),
    Panel(
        "Rejections by reason",
        "reqps",
        ((_rate("tollhouse_rejections_total", "reason"), "{{reason}}"),),
    ),
    Panel(
        "In flight and waiting for a limit",
        "short",
        (
            ("sum(tollhouse_in_flight_requests)", "in flight"),
            ("sum(tollhouse_limit_queue_requests)", "waiting"),
        ),
    ),
    _row("Latency by model"),
    _heat("Time to first token", _FIRST, SERVED),
    _heat("Request duration", "tollhouse_request_seconds"),
    Panel("Time to first token by model", "s", _quantiles(_FIRST, SERVED, "model"), bad=0.3),
    Panel("Time to first token", "s", _quantiles(_FIRST, SERVED), bad=0.3),
    Panel("Request duration by route", "s", _quantiles("tollhouse_request_seconds", by="route")),
    _row("Replicas"),
    Panel(
        "Open circuit breakers", "short", (("max by (engine) (tollhouse_breaker_open)", "{{engine}}"),)
    ),
    Panel(
        "Retries on another replica",
        "reqps",
        ((_rate("tollhouse_retries_total", "reason"), "{{reason}}"),),
    ),
    Panel(
        "Requests by a fallback model",
        "reqps",
        ((_rate("tollhouse_fallbacks_total", "model, instead"), "{{model}} → {{instead}}"),),
    ),
)  # fmt: skip

ENGINE_PANELS = (
    _stat("Running", "short", f"sum(tollhouse_engine_running{ENGINE})", None, None, _ENGINES),
    _stat("Waiting", "short", f"sum(tollhouse_engine_waiting{ENGINE})", 20, 100, _ENGINES),
    _stat("KV in use", "percentunit", f"max(tollhouse_engine_kv_usage{ENGINE})", 0.7, 0.85, _ENGINES),
    _stat("Prefix hit rate", "percentunit", _HITS, 0.3, 0.05, _ENGINES),
    _stat(
        "Tokens per second",
        "short",
        _sum("tollhouse_engine_generated_tokens_total", ENGINE),
        None,
        None,
        _ENGINES,
    ),
    _stat(
        "Preemptions per second",
        "short",
        _sum("tollhouse_engine_preemptions_total", ENGINE),
        0.1,
        1,
        _ENGINES,
    ),
    _row("By engine"),
    Panel(
        "KV cache in use",
        "percentunit",
        ((f"max by (instance) (tollhouse_engine_kv_usage{ENGINE})", "{{instance}}"),),
        "bargauge",
        0.7,
        0.85,
    ),
    Panel(
        "Running",
        "short",
        ((f"sum by (instance) (tollhouse_engine_running{ENGINE})", "{{instance}}"),),
    ),
    Panel(
        "Waiting",
        "short",
        ((f"sum by (instance) (tollhouse_engine_waiting{ENGINE})", "{{instance}}"),),
        bad=100,
    ),
    _row("Latency"),
    _heat("Step time", "tollhouse_engine_step_seconds", ENGINE),
    _heat("Inter-token latency", "tollhouse_engine_inter_token_seconds", ENGINE),
    Panel("Queue time", "s", _quantiles("tollhouse_engine_queue_seconds", ENGINE)),
    Panel("First token", "s", _quantiles("tollhouse_engine_first_token_seconds", ENGINE)),
    Panel("Inter-token latency", "s", _quantiles("tollhouse_engine_inter_token_seconds", ENGINE)),
    _row("Work"),
    Panel(
        "Tokens per second",
        "short",
        (
            (_sum("tollhouse_engine_computed_tokens_total", ENGINE), "prompt, computed"),
            (_sum("tollhouse_engine_generated_tokens_total", ENGINE), "generated"),
        ),
    ),
    Panel(
        "Unbilled tokens",
        "short",
        (
            (_sum("tollhouse_engine_recomputed_tokens_total", ENGINE), "recomputed"),
            (_sum("tollhouse_engine_discarded_tokens_total", ENGINE), "discarded"),
        ),
    ),
    Panel("Prefix hit rate", "percentunit", ((_HITS, "hit rate"),)),
    Panel(
        "Adapters by state",
        "short",
        ((f"sum by (state) (tollhouse_engine_adapters{INSTANCE})", "{{state}}"),),
    ),
    Panel(
        "Preemptions",
        "short",
        ((_rate("tollhouse_engine_preemptions_total", "instance", ENGINE), "{{instance}}"),),
    ),
)  # fmt: skip

_RECONCILIATION = "/operator/reconciliation"
BILLING = (
    _stat("Audit differences", "short", "max(tollhouse_audit_differences)", 1, 1, _RECONCILIATION),
    _stat("Last audit", "s", "max(tollhouse_audit_age_seconds)", 4000, 7500, _RECONCILIATION),
    _stat("Oldest unrated usage", "s", "max(tollhouse_unrated_age_seconds)", 60, 300, _HEALTH),
    _stat("Shipping fails for", "s", "max(tollhouse_spool_age_seconds)", 30, 300, _HEALTH),
    _stat(
        "Dead letters", "short", "max(tollhouse_dead_letters_waiting)", 1, 1, "/operator/dead-letters"
    ),
    _stat("Parked events", "short", "max(tollhouse_parked_events)", 1, 100, _HEALTH),
    _row("From engine to ledger"),
    Panel(
        "Tokens by kind",
        "short",
        ((_rate("tollhouse_tokens_total", "kind", SERVED), "{{kind}}"),),
    ),
    Panel("Spool records not yet shipped", "short", (("sum(tollhouse_spool_records)", "records"),)),
    Panel(
        "Parked spool records",
        "short",
        (
            ("sum(tollhouse_spool_parked_records)", "own"),
            ("sum(tollhouse_spool_parked_adopted_records)", "adopted"),
        ),
    ),
    _row("Tasks"),
    _heat("Run time of tasks", "tollhouse_task_seconds"),
    _heat("Queue time of tasks", "tollhouse_queue_age_seconds"),
    Panel("Run time by task", "s", _quantiles("tollhouse_task_seconds", by="task")),
    Panel("Queue time by queue", "s", _quantiles("tollhouse_queue_age_seconds", by="queue")),
    Panel("Retries", "short", ((_rate("tollhouse_task_retries_total", "task"), "{{task}}"),)),
    Panel(
        "Tenants left out",
        "short",
        ((_rate("tollhouse_tenant_failures_total", "task"), "{{task}}"),),
    ),
    Panel(
        "Payment commands",
        "short",
        ((_rate("tollhouse_payment_commands_total", "outcome"), "{{outcome}}"),),
    ),
    Panel("Parked exports", "short", (("max(tollhouse_parked_exports)", "exports"),)),
    Panel(
        "Days that wait to be moved",
        "s",
        (("max(tollhouse_unmoved_age_seconds)", "oldest"),),
    ),
    Panel(
        "ClickHouse of moved days", "short", (("max(tollhouse_clickhouse_down)", "1: not readable"),)
    ),
)  # fmt: skip

SAFETY = (
    Panel(
        "Moderation decisions",
        "reqps",
        (
            (
                _rate("tollhouse_moderation_checks_total", "direction, action"),
                "{{direction}} {{action}}",
            ),
        ),
        page="/operator/safety",
    ),
    Panel(
        "Flagged categories",
        "reqps",
        ((_rate("tollhouse_moderation_flags_total", "category"), "{{category}}"),),
    ),
    Panel("Guards", "s", _quantiles("tollhouse_moderation_guard_seconds", by="guard")),
    _heat("Screening time", "tollhouse_moderation_seconds"),
)

DASHBOARDS = {"service": SERVICE, "engine": ENGINE_PANELS, "billing": BILLING, "safety": SAFETY}
