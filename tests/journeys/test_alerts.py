"""Billing alerts fire: each is raised by its fault in running processes that Prometheus scrapes."""

import os
import re
import secrets
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psycopg
import pytest
import yaml
from sqlalchemy import func, select

from billing.pricing.prices import ensure_default_prices
from billing.usage.tables import UsageEventRow
from core.celery_queue import CeleryQueue
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.dead_letters import keeper
from core.queue import QUEUES, TASKS
from core.settings import Settings
from gateway.admin.worker.application import make_worker
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import Statement, move_to_outbox
from tests.billing.conftest import Deployment as Ledger
from tests.conftest import RABBITMQ, REDIS, need_nats, need_rabbitmq, need_redis
from tests.contracts.usage_streams import nats_url
from tests.gateway.metering.spool_rows import closed
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

PROTECTS = (
    "dashboards/alerts",
    "dashboards/grafana",
    "billing/reports",
    "gateway/admin/worker",
    "gateway/metering",
)
pytestmark = pytest.mark.proof
RULES = ROOT / "dashboards/grafana/alerts.yaml"
SCRAPES = ROOT / "deploy/prometheus.yaml"
BILLING = (
    *("RatingLate", "AuditLate", "ReconciliationOff", "InvoicesFailed", "DeadLetters"),
    *("EventsParked", "ExportsParked", "SpoolParked", "TenantsLeftOut", "SpoolStuck"),
)
STREAM = ("StreamStuck",)
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def expressions() -> dict[str, str]:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return {rule["alert"]: rule["expr"] for rule in rules}


def samples(page: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        found.setdefault(name, []).append(float(value))
    return found


@dataclass
class Site:
    """A gateway and a worker in production settings, and their pages of metrics."""

    command: Command
    database: Database
    gateway: RunningGateway
    worker_url: str
    queue: CeleryQueue
    first: dict[str, list[float]] = field(default_factory=dict)  # of the first scrape

    def page(self, job: str) -> str:
        url = {"gateway": f"{self.gateway.url}/metrics", "worker": self.worker_url}[job]
        return httpx.get(url, timeout=30).text

    def scrape(self) -> dict[str, list[float]]:
        merged: dict[str, list[float]] = {}
        for job in ("gateway", "worker"):
            for name, values in samples(self.page(job)).items():
                merged.setdefault(name, []).extend(values)
        return merged

    def raised(self, alert: str, threshold: float | None = None) -> bool:
        """Whether the alert's expression holds. Reads the part of PromQL that billing alerts use:
        max and sum of a metric or of its increase, a sum of those, and a comparison."""
        expression = expressions()[alert]
        now = self.scrape()
        text, operator, limit = re.split(r" (>|!=) ", expression)
        value = 0.0
        for part in text.split(" + "):
            match = re.fullmatch(r"(max|sum)\((increase\()?(\w+)(?:\[\w+\]\))?\)", part)
            assert match, f"{alert}: {part} is not read by this test"
            values = now.get(match[3], [])
            assert values, f"{alert}: no page exposes {match[3]}"
            found = max(values) if match[1] == "max" else sum(values)
            if match[2]:
                found -= sum(self.first.get(match[3], []))
            value += found
        wanted = float(limit) if threshold is None else threshold
        return value > wanted if operator == ">" else value != wanted

    def wait(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                shown = {name: v for name, v in self.scrape().items() if "_bucket" not in name}
                log = (self.command.data_dir / "worker.txt").read_text()[-3000:]
                raise AssertionError(f"{log}\n{shown}")
            time.sleep(0.3)

    def sql(self, *statements: str) -> None:
        url = self.database.url.replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(url) as connection:
            connection.execute("set local tollhouse.maintenance = 'on'")
            for statement in statements:
                connection.execute(statement)


@pytest.fixture
def site(tmp_path: Path, postgres_url: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    """With a stream between the gateway and the worker, if the test asks for one."""
    need_redis()
    need_rabbitmq()
    prefix = f"test-{uuid.uuid4().hex[:10]}"
    stream = {}
    if hasattr(request, "param"):
        stream["TOLLHOUSE_STREAM_URL"] = request.getfixturevalue("stream_url")
    command = Command(
        tmp_path,
        {
            "TOLLHOUSE_DATABASE_URL": postgres_url,
            "TOLLHOUSE_REDIS_URL": REDIS,
            "TOLLHOUSE_BROKER_URL": RABBITMQ,
            "TOLLHOUSE_ADMIN_TOKEN": secrets.token_hex(16),
        }
        | stream,
    )
    gateway = serve(command)
    port = free_port()
    # The queue `rating` has no worker: usage waits.
    queues = ",".join(each for each in QUEUES if each != "rating")
    options = ("--queues", queues, "--no-beat", "--concurrency", "2")
    worker = start_worker(command, prefix, *options, metrics_port=port)
    settings = Settings(
        data_dir=tmp_path, database_url=postgres_url, redis_url=REDIS, broker_url=RABBITMQ
    )
    database = Database(postgres_url)
    made = Site(
        command,
        database,
        gateway,
        f"http://127.0.0.1:{port}/metrics",
        CeleryQueue(make_worker(settings, prefix)),
    )
    try:
        made.wait(lambda: _answers(made.worker_url))
        yield made
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        reap(worker)
        gateway.stop()
        made.queue.stop()
        database.close()
        sweep(prefix, RABBITMQ)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def serve_one(site: Site) -> None:
    body = {"model": "tollhouse-demo", "prompt": "hi", "max_tokens": 1}
    sent = httpx.post(
        f"{site.gateway.url}/v1/completions", json=body, headers=site.gateway.headers, timeout=60
    )
    assert sent.status_code == 200, sent.text


@pytest.mark.timeout(300)
def test_every_billing_alert_is_raised_by_its_fault(site: Site) -> None:
    site.first = site.scrape()
    assert [alert for alert in BILLING if site.raised(alert)] == []

    with site.database.transaction() as session:
        version = ensure_default_prices(session, SystemClock(), "demo")
    ledger = Ledger(site.database, FakeClock(datetime.now(UTC)), version)
    ledger.tenant("acme")
    ledger.record(ledger.event())
    site.sql("update usage_batches set recorded_at = recorded_at - interval '10 minutes'")
    site.wait(lambda: site.raised("RatingLate"))

    ledger.record(ledger.event(price_version="price_unknown"))
    site.wait(lambda: site.raised("EventsParked"))

    ledger.rate()
    site.sql("delete from charges")
    site.queue.enqueue("billing.audit")
    site.wait(lambda: site.raised("ReconciliationOff"))

    site.sql("update audit_runs set at = at - interval '3 hours'")
    site.wait(lambda: site.raised("AuditLate"))

    error = RuntimeError("the provider refuses")
    keeper(site.database, SystemClock())(TASKS["billing.top_up"], {}, error, 9)
    site.wait(lambda: site.raised("DeadLetters"))

    site.sql(
        "insert into export_jobs (id, tenant_id, what, format, starts_at, ends_at, destination,"
        " status, attempts, next_at, created_at) values ('exp_1', 'acme', 'usage', 'csv', now(),"
        " now(), 'file', 'parked', 8, now(), now())"
    )
    site.wait(lambda: site.raised("ExportsParked"))

    ledger.tenant("fresh")
    site.sql("update billing_accounts set timezone = 'Nowhere/Town' where tenant_id = 'fresh'")
    site.queue.enqueue("billing.run_invoices")
    site.wait(lambda: site.raised("InvoicesFailed"))

    site.sql(
        "insert into top_ups (tenant_id, threshold, amount, currency, enabled)"
        " values ('acme', 10, 5, '?', true)"
    )
    site.queue.enqueue("billing.top_up")
    site.wait(lambda: site.raised("TenantsLeftOut"))

    left = SpoolFile(site.command.data_dir / "spool" / "left.db")
    left.commit([*move_to_outbox(closed("req_1")), Statement("update outbox set body = x'c1'", ())])
    left.close()
    site.wait(lambda: site.raised("SpoolParked"))

    site.sql("alter table usage_batches rename to not_there")
    serve_one(site)
    site.wait(lambda: site.raised("SpoolStuck", threshold=1.0))
    site.sql("alter table not_there rename to usage_batches")
    site.wait(lambda: not site.raised("SpoolStuck", threshold=1.0))


@pytest.fixture
def stream_url() -> Iterator[str]:
    need_nats()
    with nats_url() as url:
        yield url


@pytest.mark.timeout(300)
@pytest.mark.parametrize("site", ["stream"], indirect=True)
def test_usage_that_stays_in_the_stream_raises_an_alert(site: Site) -> None:
    """The database does not take it: the gateway's spool is empty, and the stream keeps it."""
    site.wait(lambda: not site.raised("StreamStuck", threshold=1.0))
    site.sql("alter table usage_batches rename to not_there")
    serve_one(site)
    site.wait(lambda: site.raised("StreamStuck", threshold=1.0))
    assert not site.raised("SpoolStuck", threshold=60.0)
    site.sql("alter table not_there rename to usage_batches")
    site.wait(lambda: not site.raised("StreamStuck", threshold=1.0))
    with site.database.read() as session:
        assert session.scalar(select(func.count()).select_from(UsageEventRow)) >= 1


def test_the_processes_that_prometheus_scrapes_are_those_that_serve(site: Site) -> None:
    jobs = {job["job_name"] for job in yaml.safe_load(SCRAPES.read_text())["scrape_configs"]}
    assert jobs == {"gateway", "engine", "worker"}
    site.queue.enqueue("billing.push_payments")
    site.wait(lambda: "tollhouse_task_seconds_count" in site.page("worker"))
    assert re.search(
        r'tollhouse_task_seconds_count\{task="billing.push_payments"\} 1', site.page("worker")
    ), "the pool's processes share their metrics"
