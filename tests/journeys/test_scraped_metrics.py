"""What boards and alerts name exists where Prometheus scrapes, with the engine of `serve`."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.grafana.boards import HERE
from tests.conftest import REDIS, need_redis
from tests.journeys.deployments import Command, serve

LABEL = "tollhouse_url"  # of deploy/prometheus.yaml: where the runbooks are
PROTECTS = (
    "core/metrics.py",
    "dashboards/grafana",
    "dashboards/alerts",
    "gateway/edge/own_metrics.py",
)


def named() -> set[str]:
    texts = [
        path.read_text() for path in sorted(HERE.iterdir()) if path.suffix in (".json", ".yaml")
    ]
    texts += [path.read_text() for path in sorted((HERE.parent / "alerts").glob("*.py"))]
    return set(re.findall(r"\btollhouse_\w+", "\n".join(texts))) - {LABEL}


def check(text: str, *, engines: int, shared: bool) -> None:
    """Processes that share a page write a metric with labels once it has a value."""
    exist: set[str] = set()
    for family in text_string_to_metric_families(text):
        ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        exist |= {family.name, *(family.name + end for end in ends.get(family.type, ()))}
    wanted = named()
    of_engines = {name for name in wanted if name.startswith("tollhouse_engine_")}
    assert len(of_engines) >= 15
    assert (of_engines if shared else wanted) - exist == set()
    names = set(re.findall(r'tollhouse_engine_running\{engine="([^"]+)"', text))
    assert names == {f"local-{slot}" for slot in range(engines)}
    heads = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(heads) == len(set(heads))


@pytest.mark.proof
def test_what_boards_and_alerts_name_is_scraped_with_two_processes_and_two_engines(
    tmp_path: Path,
) -> None:
    """With one of each it is in test_serve.py."""
    need_redis()
    settings = {
        "TOLLHOUSE_WORKERS": "2",
        "TOLLHOUSE_ENGINES": "2",
        "TOLLHOUSE_REDIS_URL": REDIS,
    }
    gateway = serve(Command(tmp_path, settings))
    try:
        check(httpx.get(f"{gateway.url}/metrics", timeout=30).text, engines=2, shared=True)
    finally:
        gateway.stop()
