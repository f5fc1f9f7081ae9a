"""Alerts about service, engines and stores fire: each is raised by its fault in running processes, and a
real Prometheus, which scrapes them by the jobs of `deploy/prometheus.yaml`, evaluates its rule."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
import yaml

from billing.audit import reconcile
from billing.pricing.prices import ensure_default_prices
from core.clock import FakeClock, SystemClock
from core.database import Database
from tests.billing.conftest import Deployment as Ledger
from tests.conftest import POSTGRES, RABBITMQ, need_rabbitmq
from tests.gateway.admission.test_redis_down import Server as Redis
from tests.gateway.engines.test_suspects import site as hanging_site
from tests.gateway.engines.test_suspects import upload
from tests.journeys.deployments import (
    ROOT,
    Command,
    RunningGateway,
    free_port,
    reap,
    serve,
    start_worker,
    sweep,
)
from tests.journeys.test_alerts import BILLING, RULES, STREAM, expressions
from tests.silent_proxy import proxied

PROTECTS = (
    "dashboards/alerts",
    "dashboards/grafana",
    "deploy/prometheus.yaml",
    "core/postgres_connection.py",
    "core/worker_liveness.py",
    "engine/metrics.py",
    "gateway/engines/routing",
)
pytestmark = pytest.mark.proof
STORES = ("ClickHouseDown", "DaysNotMoved", "DatabaseUnreachable", "LimitsNotShared")
SLOW = ("FirstTokenSlow", "GoodputLow", "PrefixHitRateLow", "QueueDeep", "KvCacheFull")
HUNG = ("AdapterQuarantined", "RequestsLost")
BEHIND, WORKERS = ("DatabaseBehind",), ("WorkerSilent",)
SILENT = ("ConnectionsSilent",)
DOWN = ("TargetDown", "ModelNotServed")
BROKEN = ("ThroughputGone", "BreakerOpen", "ErrorRateHigh")
CLOSED = 'tollhouse_silent_connections_total{service="postgresql"}'
LATE_S = 400.0
FLOOD = 130  # requests at once


@dataclass
class Prometheus:
    process: "subprocess.Popen[bytes]"
    url: str

    def query(self, expression: str) -> list[Any]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        found: list[Any] = answer.json()["data"]["result"]
        return found

    def raised(self, *alerts: str) -> set[str]:
        """Those of the alerts (by default of all) whose expression holds now, whatever time it must
        hold for."""
        found = expressions()
        return {name for name in alerts or found if self.query(found[name])}

    def wait(self, *alerts: str) -> None:
        """Until each has been raised, at one time or another."""
        missing = {*alerts}

        def _seen() -> bool:
            missing.difference_update(self.raised(*missing))
            return not missing

        self.until(_seen, f"of {alerts} some were not raised")

    def wait_clear(self, alert: str) -> None:
        self.until(lambda: not self.raised(alert), f"{alert} stays raised")

    def until(self, holds: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + LATE_S
        while not holds():
            assert time.monotonic() < deadline, f"{otherwise}; raised are {self.raised()}"
            time.sleep(0.5)


def start_prometheus(folder: Path, targets: dict[str, str]) -> Prometheus:
    """With the rules and jobs that we ship; each job's target is that of the test."""
    config = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text())
    # A busy machine answers a scrape in seconds, and one that is late counts as a target that is down.
    config["global"] |= {"scrape_interval": "5s", "evaluation_interval": "5s"}
    config["rule_files"] = [str(RULES)]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    config["scrape_configs"] = [
        jobs[name] | {"static_configs": [{"targets": [place]}]} for name, place in targets.items()
    ]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    place = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            str(shutil.which("prometheus")),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={place}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    made = Prometheus(process, f"http://{place}")

    def _scrapes() -> bool:
        with suppress(httpx.HTTPError):
            return len(made.query("up == 1")) == len(targets)
        return False

    deadline = time.monotonic() + LATE_S
    while not _scrapes():
        assert time.monotonic() < deadline, "Prometheus does not scrape"
        time.sleep(0.5)
    return made


@dataclass
class Site:
    gateway: RunningGateway
    engine: "subprocess.Popen[str]"
    redis: Redis
    prometheus: Prometheus
    device: Path  # seconds that a step takes longer

    def ask(self, name: str, tokens: int, timeout_s: float = 60, *, stream: bool = False) -> int:
        """The status, or 0 where the client gave up."""
        body = {"model": "tollhouse-demo", "prompt": name, "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": stream}
        url = f"{self.gateway.url}/v1/completions"
        with suppress(httpx.HTTPError):
            return httpx.post(
                url, json=body, headers=self.gateway.headers, timeout=timeout_s
            ).status_code
        return 0

    def in_background(self, count: int, tokens: int) -> list[threading.Thread]:
        asked = [
            threading.Thread(
                target=self.ask,
                args=(f"{number} tolls", tokens, 600),
                kwargs={"stream": True},
                daemon=True,
            )
            for number in range(count)
        ]
        for each in asked:
            each.start()
        return asked


@pytest.fixture
def site(tmp_path: Path, postgres_url: str) -> Iterator[Site]:
    if shutil.which("prometheus") is None or shutil.which("redis-server") is None:
        pytest.skip("install prometheus and redis (Debian's packages) to run this test")
    device, port, watched = tmp_path / "device", free_port(), free_port()
    device.write_text("0")
    redis = Redis()
    command = Command(
        tmp_path,
        {
            "TOLLHOUSE_DATABASE_URL": postgres_url,
            "TOLLHOUSE_REDIS_URL": redis.url,
            "TOLLHOUSE_UPSTREAMS": f"tcp://127.0.0.1:{port}",
            "TOLLHOUSE_EVENTS_URL": "clickhouse://user:secret@127.0.0.1:1/db",  # nothing is there
        },
    )
    engine = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.journeys.faulty_engine", str(device)),
            *("--model", str(ROOT / "engine/demo/weights"), "--listen", f"tcp://127.0.0.1:{port}"),
            *("--metrics-port", str(watched), "--no-enable-lora", "--max-running", "2"),
            *("--max-context", "256", "--num-blocks", "20"),
        ],
        cwd=ROOT,
        env=command.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    assert json.loads(engine.stdout.readline())["event"] == "ready"
    gateway = serve(command)
    prometheus = start_prometheus(
        tmp_path,
        {"gateway": gateway.url.removeprefix("http://"), "engine": f"127.0.0.1:{watched}"},
    )
    try:
        yield Site(gateway, engine, redis, prometheus, device)
    finally:
        prometheus.process.kill()
        prometheus.process.wait(60)
        engine.kill()
        reap(engine)
        gateway.kill()
        redis.kill()


@pytest.mark.timeout(2400)
def test_every_alert_of_service_engines_and_stores_is_raised_by_its_fault(
    site: Site, postgres_url: str
) -> None:
    seen = site.prometheus
    seen.wait("ClickHouseDown")
    assert seen.raised() == {"ClickHouseDown"}

    leave_days_behind(postgres_url)
    seen.wait("DaysNotMoved")

    site.device.write_text("inf")
    site.in_background(1, 8)
    seen.wait("ThroughputGone")
    site.device.write_text("0.05")
    seen.wait_clear("ThroughputGone")

    site.in_background(FLOOD, 200)
    seen.wait(*SLOW)

    site.redis.kill()
    site.ask("without Redis", 1, timeout_s=5)
    seen.wait("LimitsNotShared")
    site.redis.start()

    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(POSTGRES, autocommit=True) as admin:
        admin.execute(f"alter database {name} allow_connections false")
        admin.execute(
            f"select pg_terminate_backend(pid) from pg_stat_activity where datname='{name}'"
        )
        seen.wait("DatabaseUnreachable")
        admin.execute(f"alter database {name} allow_connections true")
    seen.wait_clear("DatabaseUnreachable")

    os.kill(site.engine.pid, signal.SIGKILL)
    asked = [site.ask(f"to nobody {number}", 1, timeout_s=120) for number in range(4)]
    assert 200 not in asked
    seen.wait(*DOWN)
    seen.wait("BreakerOpen", "ErrorRateHigh")

    with psycopg.connect(postgres_url, autocommit=True) as own:
        own.execute("insert into recoveries (found_at, reason, report) values (now(), 'it', '{}')")
    seen.wait(*BEHIND)


@pytest.mark.timeout(600)
def test_an_engine_that_hangs_with_an_adapter_raises_its_alerts(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("install prometheus (Debian's package) to run this test")
    with hanging_site(tmp_path, 1) as made:
        place = made.deployment.url.removeprefix("http://")
        prometheus = start_prometheus(tmp_path, {"gateway": place})
        try:
            assert not prometheus.raised(*HUNG)
            assert upload(made.deployment, "evil").status_code == 201
            assert made.ask(7, model="evil").status_code == 503
            prometheus.wait(*HUNG)
        finally:
            prometheus.process.kill()
            prometheus.process.wait(60)


@pytest.mark.timeout(900)
def test_a_worker_that_takes_no_tasks_raises_its_alert_and_asks_for_a_restart(
    tmp_path: Path,
) -> None:
    need_rabbitmq()
    if shutil.which("prometheus") is None:
        pytest.skip("install prometheus (Debian's package) to run this test")
    command = Command(tmp_path, {"TOLLHOUSE_BROKER_URL": RABBITMQ})
    assert command.run("migrate").returncode == 0
    prefix, port = f"test-{uuid.uuid4().hex[:10]}", free_port()
    worker = start_worker(command, prefix, "--concurrency", "1", metrics_port=port)
    prometheus = None
    try:
        prometheus = start_prometheus(tmp_path, {"worker": f"127.0.0.1:{port}"})
        assert not prometheus.raised(*WORKERS)
        os.kill(worker.pid, signal.SIGSTOP)  # its connection stays open, its scheduler goes on
        prometheus.wait(*WORKERS)
        health = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30)
        assert (health.status_code, health.text[:17]) == (503, "no task was taken")
    finally:
        if prometheus is not None:
            prometheus.process.kill()
            prometheus.process.wait(60)
        os.killpg(worker.pid, signal.SIGKILL)
        reap(worker)
        sweep(prefix, RABBITMQ)


@pytest.mark.timeout(600)
def test_a_network_that_loses_connections_without_a_word_raises_its_alert(
    tmp_path: Path, postgres_url: str
) -> None:
    """Each fault silences the connections that are open; over new ones the gateway goes on."""
    if shutil.which("prometheus") is None:
        pytest.skip("install prometheus (Debian's package) to run this test")
    with proxied(("127.0.0.1", urlsplit(postgres_url).port or 5432)) as network:
        url = urlsplit(postgres_url)._replace(netloc=f"root@{network.netloc}").geturl()
        gateway = serve(Command(tmp_path, {"TOLLHOUSE_DATABASE_URL": url}))
        prometheus = None
        try:
            place = gateway.url.removeprefix("http://")
            prometheus = start_prometheus(tmp_path, {"gateway": place})
            assert prometheus.query(CLOSED)[0]["value"][1] == "0"
            assert not prometheus.raised(*SILENT)
            for closed in range(1, 5):
                network.silence()
                prometheus.until(
                    lambda closed=closed: int(prometheus.query(CLOSED)[0]["value"][1]) >= closed,
                    "no silent connection is closed",
                )
            prometheus.wait(*SILENT)
            assert "DatabaseUnreachable" not in prometheus.raised()
        finally:
            if prometheus is not None:
                prometheus.process.kill()
                prometheus.process.wait(60)
            gateway.kill()


def test_each_alert_is_raised_by_one_of_these_tests() -> None:
    assert {*expressions()} == {
        *BILLING,
        *STREAM,
        *STORES,
        *SLOW,
        *BROKEN,
        *HUNG,
        *DOWN,
        *BEHIND,
        *WORKERS,
        *SILENT,
    }


def leave_days_behind(url: str) -> None:
    """A day of ten days ago with a request, closed then."""
    database = Database(url)
    with database.transaction() as session:
        version = ensure_default_prices(session, SystemClock(), "demo")
    ledger = Ledger(database, FakeClock(datetime.now(UTC) - timedelta(days=10)), version)
    ledger.tenant("acme")
    ledger.record(ledger.event())
    ledger.rate()
    ledger.clock.advance(days=1, hours=2)
    assert reconcile.close_days(database, ledger.clock)
    database.close()
