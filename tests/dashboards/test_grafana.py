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
from dashboards.grafana.boards import DASHBOARDS, HERE, to_json
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


def test_every_alert_says_what_to_do_about_a_metric_that_exists() -> None:
    rules = yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert len(rules) >= 11
    for rule in rules:
        assert rule["annotations"]["action"]
        names = named_in(rule["expr"])
        assert names and not names - known_names(), rule["alert"]


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
