"""Alerts and their runbooks: each has one, what it names exists, and the page says what holds now."""

import argparse
import re
import shlex
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import REGISTRY
from sqlalchemy import text
from starlette.routing import Match

from core import metrics
from core.settings import setting_names
from dashboards.alerts.catalog import ALERTS
from dashboards.alerts.conditions import Figures, reading
from dashboards.grafana.boards import HERE
from dashboards.pages.routes import ROUTES
from dashboards.traffic import Traffic
from engine.metrics import Metrics, render
from gateway.cli.main import command_module, command_names
from tests.dashboards.browser_client import browser, with_role
from tests.deploy.tools import CHART, MISSING, available
from tests.deploy.tools import render as render_chart
from tests.gateway.deployment import Deployment

ROOT = Path(__file__).parents[2]
PAGE = "/dashboard/operator/alerts"
BOOKS = [
    pytest.param(
        " ".join([*alert.runbook.see, *alert.runbook.do, alert.runbook.over]), id=alert.name
    )
    for alert in ALERTS
]


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"][0][
        "rules"
    ]
    return found


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    names = [rule["alert"] for rule in rules()]
    written = (ROOT / "docs" / "runbooks.md").read_text()
    assert re.findall(r"^## (\w+)$", written, re.MULTILINE) == names
    assert len(set(names)) == len(names) >= 21
    for section in re.split(r"^## ", written, flags=re.MULTILINE)[1:]:
        assert re.search(r"^See it:\n\n- ", section, re.MULTILINE), section[:40]
        assert re.search(r"^What to do:\n\n1\. ", section, re.MULTILINE), section[:40]
        assert "When it is over:" in section
    for rule in rules():
        address = rule["annotations"]["runbook_url"]
        assert address.endswith(f"}}}}{PAGE}#{rule['alert']}"), address


@pytest.mark.parametrize("book", BOOKS)
def test_commands_of_a_runbook_exist(book: str) -> None:
    for command in re.findall(r"`tollhouse ([^`]+)`", book):
        words = shlex.split(command)
        assert words[0] in command_names(), command
        parser = argparse.ArgumentParser(exit_on_error=False)
        command_module(words[0]).configure(parser)
        parser.parse_args(words[1:])


@pytest.mark.parametrize("book", BOOKS)
def test_pages_metrics_and_settings_of_a_runbook_exist(book: str) -> None:
    names = {alert.name for alert in ALERTS}
    for target in re.findall(r"\]\(([^)]*)\)", book):
        if target.startswith("#"):
            assert target[1:] in names
            continue
        scope = {"type": "http", "path": target, "method": "GET", "headers": []}
        assert any(route.matches(scope)[0] is Match.FULL for route in ROUTES), target
    assert metrics.requests
    known = {
        sample for family in REGISTRY.collect() for sample in (family.name, f"{family.name}_total")
    }
    known |= set(re.findall(r"^# TYPE (\S+)", render(Metrics(), {}, "m", {}, {}), re.MULTILINE))
    assert set(re.findall(r"`(tollhouse_\w+)`", book)) <= known
    assert set(re.findall(r"TOLLHOUSE_\w+", book)) <= set(setting_names())


def test_what_a_runbook_says_is_found_on_its_pages(operator: httpx.Client) -> None:
    """The buttons and headings that the steps name."""
    for path, words in {
        "engines": ("Drain",),
        "traffic": ("Errors by cause", "First token p95", "Cached input"),
        "reconciliation": ("Audit now",),
        "parked": ("Parked usage",),
        "dead-letters": ("Dead letters",),
    }.items():
        page = operator.get(f"/dashboard/operator/{path}").text
        assert all(each in page for each in words), path


def test_the_chart_has_the_same_alerts_and_leads_to_its_own_pages() -> None:
    linked = CHART / "files" / "alerts.yaml"
    assert linked.resolve() == (HERE / "alerts.yaml").resolve()
    if not available():
        pytest.skip(MISSING)
    documents = render_chart("--set=monitoring.enabled=true")
    [made] = [each for each in documents if each["kind"] == "PrometheusRule"]
    found = made["spec"]["groups"][0]["rules"]
    assert [rule["alert"] for rule in found] == [rule["alert"] for rule in rules()]
    assert [rule["expr"] for rule in found] == [rule["expr"] for rule in rules()]
    site = yaml.safe_load((CHART / "values.yaml").read_text())["settings"]["TOLLHOUSE_PUBLIC_URL"]
    assert found[0]["annotations"]["runbook_url"] == f"{site}{PAGE}#{found[0]['alert']}"


def test_compose_s_prometheus_reads_the_rules_and_fills_in_the_site(tmp_path: Path) -> None:
    found = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text())
    assert list(found["global"]["external_labels"]) == ["tollhouse_url"]
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package `prometheus` has it")
    waiting = next(rule for rule in rules() if rule["alert"] == "QueueDeep")
    site = "https://llm.example.com"
    annotations = {**waiting["annotations"], "runbook_url": f"{site}{PAGE}#QueueDeep"}
    raised = {"exp_labels": waiting["labels"], "exp_annotations": annotations}
    case = {
        "interval": "1m",
        "external_labels": {"tollhouse_url": site},
        "input_series": [{"series": "tollhouse_engine_waiting", "values": "101x20"}],
        "alert_rule_test": [
            {"eval_time": "4m", "alertname": "QueueDeep", "exp_alerts": []},
            {"eval_time": "10m", "alertname": "QueueDeep", "exp_alerts": [raised]},
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(HERE / "alerts.yaml")], "tests": [case]}))
    ran = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def states(client: httpx.Client) -> dict[str, str]:
    lines = client.get(f"{PAGE}?format=csv").text.splitlines()[1:]
    return {name: state for name, state, *_ in (line.split(",") for line in lines)}


def test_the_page_says_what_holds_what_is_clear_and_what_it_cannot_know(
    deployment: Deployment, operator: httpx.Client
) -> None:
    found = states(operator)
    assert set(found) == {rule["alert"] for rule in rules()}
    unseen = {name for name, state in found.items() if state == "not evaluated here"}
    assert unseen == {
        *("PrefixHitRateLow", "ThroughputGone", "AdapterQuarantined", "RequestsLost"),
        "ConnectionsSilent",
        *("DatabaseUnreachable", "InvoicesFailed", "TenantsLeftOut", "TargetDown", "WorkerSilent"),
    }
    assert "holds" not in found.values()
    faults = {
        "DeadLetters": "insert into dead_letters (task, queue, arguments, error, died_at, attempts)"
        " values ('billing.top_up', 'payments', '{}', 'refused', :now, 9)",
        "ExportsParked": "insert into export_jobs (id, tenant_id, what, format, starts_at, ends_at,"
        " destination, status, attempts, next_at, created_at) values ('exp_1', :tenant, 'usage', 'csv',"
        " :now, :now, 'file', 'parked', 6, :now, :now)",
        "ReconciliationOff": "insert into audit_runs (at, clean, report)"
        ' values (:now, 0, \'{"differences": [{"kind": "lost"}]}\')',
        "DatabaseBehind": "insert into recoveries (found_at, reason, report) values (:now, 'it', '{}')",
        "AuditLate": "update audit_runs set at = '2020-01-01 00:00:00.000000'",
    }
    now = deployment.services.clock.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    for alert, statement in faults.items():
        with deployment.services.database.transaction() as session:
            session.execute(text(statement), {"now": now, "tenant": deployment.tenant_id})
        assert states(operator)[alert] == "holds", alert
    page = operator.get(PAGE).text
    assert page.index('id="AuditLate"') < page.index('id="FirstTokenSlow"'), (
        "what holds comes first"
    )
    assert 'href="/dashboard/operator/dead-letters"' in page
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        assert owner.get(PAGE).status_code == 403


def test_a_breaker_of_this_gateway_is_seen(deployment: Deployment, operator: httpx.Client) -> None:
    gauge = metrics.breaker_open.labels("elsewhere")
    gauge.set(1)
    try:
        assert states(operator)["BreakerOpen"] == "holds"
    finally:
        metrics.breaker_open.remove("elsewhere")
    assert states(operator)["BreakerOpen"] == "clear"


def slow(counts: dict[int, int], **sums: int) -> Traffic:
    made = Traffic(**sums)
    for index, count in counts.items():
        made.first_token[index] = count
    return made


@pytest.mark.parametrize(
    ("alert", "changed", "value"),
    [  # by hand; class 4 ends at 300 ms, class 5 at 500 ms
        ("FirstTokenSlow", {"last_5": slow({5: 100})}, 0.49),
        ("GoodputLow", {"last_10": slow({4: 94, 5: 6})}, 0.94),
        ("ErrorRateHigh", {"last_5": slow({}, requests=500, failed=1)}, 0.002),
        ("QueueDeep", {"waiting": 101}, 101),
        ("KvCacheFull", {"kv_shares": [0.2, 0.86]}, 0.86),
        ("LimitsNotShared", {"own": {"tollhouse_limit_mode": [1.0]}}, 1),
        ("ModelNotServed", {"own": {"tollhouse_model_unserved": [0.0, 1.0]}}, 1),
        ("SpoolStuck", {"own": {"tollhouse_spool_age_seconds": [301.0]}}, 301),
        ("SpoolParked", {"own": {"tollhouse_spool_parked_adopted_records": [2.0]}}, 2),
        ("RatingLate", {"stored": {"tollhouse_unrated_age_seconds": 301}}, 301),
        ("EventsParked", {"stored": {"tollhouse_parked_events": 1}}, 1),
    ],
)
def test_a_condition_holds_by_the_rule_s_own_limit(
    alert: str, changed: dict[str, Any], value: float
) -> None:
    calm = Figures({}, {}, 0, [], Traffic(), Traffic(), has_stream=False)
    [rule] = [each for each in ALERTS if each.name == alert]
    found = reading(rule, replace(calm, **changed))
    assert found.holds and found.value == pytest.approx(value)
    assert rule.condition == next(each["expr"] for each in rules() if each["alert"] == alert)
    if "stored" not in changed:
        assert reading(rule, calm).holds is False


def test_a_stream_s_age_is_not_guessed() -> None:
    [rule] = [each for each in ALERTS if each.name == "StreamStuck"]
    calm = Figures({}, {}, 0, [], Traffic(), Traffic(), has_stream=True)
    assert reading(rule, calm).holds is None
