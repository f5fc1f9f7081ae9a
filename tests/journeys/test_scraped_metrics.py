"""What boards and alerts name exists where Prometheus scrapes, with the engine of `serve`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.grafana.boards import HERE
from tests.conftest import REDIS, need_redis

LABEL = "tollhouse_url"  # of deploy/prometheus.yaml: where the runbooks are
ROOT = Path(__file__).parents[2]


def named() -> set[str]:
    texts = [
        path.read_text() for path in sorted(HERE.iterdir()) if path.suffix in (".json", ".yaml")
    ]
    texts += [path.read_text() for path in sorted((HERE.parent / "alerts").glob("*.py"))]
    return set(re.findall(r"\btollhouse_\w+", "\n".join(texts))) - {LABEL}


@contextmanager
def serving(data: Path, **settings: str) -> Iterator[str]:
    kept = {name: value for name, value in os.environ.items() if "TOLLHOUSE_" not in name}
    own = {"TOLLHOUSE_DATA_DIR": str(data), "TOLLHOUSE_PORT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli.main", "serve"],
        cwd=ROOT,
        env=kept | own | settings,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(each for each in process.stdout if each.startswith("{"))
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "engines"),
    [({}, 1), ({"TOLLHOUSE_WORKERS": "2", "TOLLHOUSE_ENGINES": "2"}, 2)],
)
def test_what_boards_and_alerts_name_is_scraped(
    tmp_path: Path, settings: dict[str, str], engines: int
) -> None:
    if settings:
        need_redis()
        settings = settings | {"TOLLHOUSE_REDIS_URL": REDIS}
    with serving(tmp_path / "data", **settings) as url:
        text = httpx.get(f"{url}/metrics", timeout=30).text
    exist: set[str] = set()
    for family in text_string_to_metric_families(text):
        ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        exist |= {family.name, *(family.name + end for end in ends.get(family.type, ()))}
    wanted = named()
    of_engines = {name for name in wanted if name.startswith("tollhouse_engine_")}
    assert len(of_engines) >= 15
    # Processes that share a page write a metric with labels once it has a value.
    assert (of_engines if settings else wanted) - exist == set()
    names = set(re.findall(r'tollhouse_engine_running\{engine="([^"]+)"', text))
    assert names == {f"local-{slot}" for slot in range(engines)}
    heads = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(heads) == len(set(heads))
