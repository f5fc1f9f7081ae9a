"""Every panel of the boards on recorded metrics: what a gateway wrote while it served requests, and what
an engine writes, evaluated by promtool. A panel without a row fails."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core import metrics
from dashboards.grafana.boards import dashboard
from dashboards.grafana.panels import DASHBOARDS
from engine.metrics import Metrics, render
from tests.gateway.deployment import MODEL, Deployment

_MINUTES = 60


@pytest.fixture(scope="module")
def recorded(deployment: Deployment) -> list[dict[str, str]]:
    """The series of both scrapes as promtool's input, at one sample a minute. Counters grow by what was
    counted; gauges keep their value."""
    _serve(deployment)
    _rare()
    with_labels = [(generate_latest().decode(), ""), (_engine(), 'instance="engine-a"')]
    return [line for text, label in with_labels for line in _series(text, label)]


def _serve(deployment: Deployment) -> None:
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0) as client:
        for _ in range(3):
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=8,
                stream=True,
            )
            assert list(stream)
    deployment.last_event()


def _rare() -> None:
    """What no healthy gateway of a few seconds counts."""
    metrics.requests.labels("/v1/chat/completions", "503").inc()
    metrics.rejections.labels("requests").inc()
    metrics.retries.labels("unavailable").inc()
    metrics.fallbacks.labels(MODEL, "other").inc()
    metrics.moderation_flags.labels("violence", "block").inc()
    metrics.moderation_guard_seconds.labels("llama-guard").observe(0.2)
    metrics.queue_age_seconds.labels("billing").observe(0.2)
    metrics.task_seconds.labels("billing.rate").observe(0.2)
    metrics.task_retries.labels("billing.rate").inc()
    metrics.tenant_failures.labels("billing.rate").inc()
    metrics.payment_commands.labels("done").inc()


def _engine() -> str:
    """Of an engine that served, preempted and recomputed."""
    made = Metrics()
    for name in ("prefix_queries", "prefix_hits", "computed_tokens", "generated_tokens"):
        made.add(name, 64)
    for name in ("recomputed_tokens", "discarded_tokens", "preemptions"):
        made.add(name)
    made.step(0.02, 64)
    for name in ("queue_seconds", "first_token_seconds", "inter_token_seconds"):
        made.observe(name, 0.02)
    gauges = {"running": 2, "waiting": 1, "kv_usage": 0.4}
    return render(made, gauges, MODEL, {"resident": 1}, {})


def _series(text: str, label: str) -> list[dict[str, str]]:
    found = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("tollhouse_"):
                continue
            labels = [f"{name}={_quoted(value)}" for name, value in sample.labels.items()]
            name = f"{sample.name}{{{','.join([*labels, *([label] if label else [])])}}}"
            grows = family.type in ("counter", "histogram")
            start, step = (0.0, sample.value) if grows else (sample.value, 0.0)
            found.append({"series": name, "values": f"{start!r}+{step!r}x{_MINUTES}"})
    return found


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _panels() -> dict[str, str]:
    """The expressions by board, panel and query, with All in Grafana's variables."""
    found = {}
    for board in DASHBOARDS:
        for panel in dashboard(board)["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "5m")
                text = text.replace("$model", ".*").replace("$engine", ".*")
                found[f"{board}: {panel['title']} {target['refId']} {panel['id']}"] = text
    return found


def _complaint(expressions: list[str], recorded: list[dict[str, str]], folder: Path) -> str:
    """promtool's, with each expression that gives no rows with numbers: not-a-number is not equal to
    itself."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package `prometheus` has it")
    names = set(re.findall(r"\btollhouse_\w+", " ".join(expressions)))
    series = [each for each in recorded if each["series"].partition("{")[0] in names]
    asked = [
        {
            "expr": f"count(({each}) == ({each})) > bool 0",
            "eval_time": f"{_MINUTES}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for each in expressions
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    path = folder / "test.yaml"
    path.write_text(json.dumps({"rule_files": [], "tests": [test]}))  # which is YAML, too
    command = [promtool, "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_every_panel_shows_rows_of_recorded_metrics(
    recorded: list[dict[str, str]], tmp_path: Path
) -> None:
    panels = _panels()
    assert len(panels) > 60
    complaint = _complaint([*panels.values()], recorded, tmp_path)
    assert not complaint, complaint


@pytest.mark.parametrize(
    "expression",
    [
        'sum(rate(tollhouse_requests_total{status="299"}[5m]))',
        'sum(rate(tollhouse_first_token_seconds_bucket{le="0.31"}[5m]))',
        "sum(rate(tollhouse_no_such_total[5m]))",
        "sum(0 * tollhouse_limit_mode) / sum(0 * tollhouse_limit_mode)",
    ],
)
def test_a_panel_without_rows_would_be_found(
    expression: str, recorded: list[dict[str, str]], tmp_path: Path
) -> None:
    fine = next(iter(_panels().values()))
    complaint = _complaint([fine, expression], recorded, tmp_path)
    assert "FAILED" in complaint and fine not in complaint
    assert expression.replace('"', '\\"') in complaint
