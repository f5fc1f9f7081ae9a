"""Boards and alerts: as the code writes them, and every metric that they name exists."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import prometheus_client
import pytest
import yaml

from core import metrics
from dashboards.grafana.boards import HERE, dashboard, to_json
from dashboards.grafana.panels import DASHBOARDS
from dashboards.navigation import SECTIONS
from engine.metrics import Metrics, render


def known_names() -> set[str]:
    assert metrics.requests
    texts = [
        prometheus_client.generate_latest().decode(),
        render(Metrics(), {}, "m", {"resident": 1}, {}),
    ]
    names = set()
    for text in texts:
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
            names.add(name)
            if kind == "histogram":
                names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\btollhouse_\w+", text))


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_a_board_is_as_written_and_names_only_what_exists(name: str) -> None:
    text = (HERE / f"{name}.json").read_text()
    assert text == to_json(name), "stale: run `python -m dashboards.grafana.boards`"
    assert json.loads(text)["panels"]
    assert named_in(text) - known_names() == set()


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_panels_lie_side_by_side_and_lead_to_pages(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    pages = {section.path for section in SECTIONS}
    board = dashboard(name)
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for link in panel.get("links", []):
            assert link["url"].removeprefix("${site}/dashboard").partition("?")[0] in pages
    kinds = {panel["type"] for panel in board["panels"]}
    assert "timeseries" in kinds and "heatmap" in kinds
    if name != "safety":
        stats = [panel for panel in board["panels"] if panel["type"] == "stat"]
        assert len(stats) == 6 and all(panel["links"] for panel in stats)
        assert {"stat", "row"} <= kinds


def test_the_engine_board_selects_by_labels_that_engines_write() -> None:
    text = render(Metrics(), {}, "m", {"resident": 1}, {})
    for panel in dashboard("engine")["panels"]:
        for target in panel.get("targets", []):
            for name in named_in(target["expr"]):
                lines = [line for line in text.splitlines() if re.match(rf"{name}(\{{| )", line)]
                assert lines, name
                if "model_name" in target["expr"]:
                    assert all('model_name="m"' in line for line in lines), name


def _expressions() -> dict[str, str]:
    """By board and panel, with Grafana's variables as it fills them in for All."""
    found = {}
    for name in DASHBOARDS:
        for panel in dashboard(name)["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "5m")
                text = text.replace("$model", ".*").replace("$engine", ".*")
                key = f"{name}:{panel['title']}:{target['refId']}"
                found[re.sub(r"\W+", "_", key)] = text
    return found


def _promtool(*arguments: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package `prometheus` has it")
    result = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_reads_every_expression_of_the_boards(tmp_path: Path) -> None:
    rules = [{"record": f"p_{i}", "expr": text} for i, text in enumerate(_expressions().values())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    _promtool("check", "rules", str(path))


_SERIES = {
    'tollhouse_requests_total{route="/v1/chat/completions", status="200"}': "0+99x60",
    'tollhouse_requests_total{route="/v1/chat/completions", status="503"}': "0+1x60",
    'tollhouse_first_token_seconds_bucket{model="tiny", le="0.2"}': "0+50x60",
    'tollhouse_first_token_seconds_bucket{model="tiny", le="0.3"}': "0+90x60",
    'tollhouse_first_token_seconds_bucket{model="tiny", le="+Inf"}': "0+100x60",
    'tollhouse_first_token_seconds_count{model="tiny"}': "0+100x60",
    'tollhouse_engine_kv_usage{model_name="tiny", instance="a"}': "0.5x60",
    'tollhouse_engine_kv_usage{model_name="tiny", instance="b"}': "0.8x60",
    'tollhouse_engine_prefix_hits_total{model_name="tiny", instance="a"}': "0+30x60",
    'tollhouse_engine_prefix_queries_total{model_name="tiny", instance="a"}': "0+120x60",
}
_SHOWN: dict[str, list[tuple[str, float]]] = {  # by hand, from the series above
    "service_Error_rate_A": [("{}", 0.01)],
    "service_Error_budget_burn_A": [("{}", 10)],
    "service_Goodput_A": [("{}", 0.9)],
    "engine_Prefix_hit_rate_A": [("{}", 0.25)],
    "engine_KV_in_use_A": [("{}", 0.8)],
    "engine_KV_cache_in_use_A": [('{instance="a"}', 0.5), ('{instance="b"}', 0.8)],
}


def test_the_boards_show_what_recorded_series_say(tmp_path: Path) -> None:
    texts = _expressions()
    asked = [
        {
            "expr": f"round({texts[key]}, 0.0001)",
            "eval_time": "60m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in shown],
        }
        for key, shown in _SHOWN.items()
    ]
    series = [{"series": name, "values": values} for name, values in _SERIES.items()]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    _promtool("test", "rules", str(path))


def test_every_alert_says_what_to_do_about_a_metric_that_exists() -> None:
    rules = yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert len(rules) >= 11
    for rule in rules:
        assert rule["annotations"]["action"]
        names = named_in(rule["expr"])
        assert not names - known_names(), rule["alert"]
        assert names or rule["expr"] == "up == 0", rule["alert"]  # `up` is Prometheus' own


def test_promtool_accepts_the_rules_and_both_pages_of_metrics(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package `prometheus` has it")
    command = [promtool, "check", "rules", str(HERE / "alerts.yaml")]
    assert subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    pages = [
        prometheus_client.generate_latest(),
        render(Metrics(), {}, "m", {}, {"max_lora": "1"}).encode(),
    ]
    for page in pages:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=page, capture_output=True, timeout=30
        )
        # 1 is a syntax error, 3 a matter of naming taste (vLLM's names have colons).
        assert checked.returncode in (0, 3), checked.stderr.decode()
