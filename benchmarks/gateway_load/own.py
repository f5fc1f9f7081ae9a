"""Our gateway with everything on: key, limits over four scopes, a budget, moderation, prompt order,
durable metering; its engine is the mock upstream."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks.gateway_load.load import Server
from billing.notices import budgets
from billing.usage.tables import UsageEventRow
from core.clock import SystemClock
from core.database import Database
from core.money import Money, units_of
from core.tenants.limits import set_rule
from core.tenants.models import ApiKey, Tenant
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from engine.demo.paths import MODEL_DIR

ROOT = Path(__file__).parents[2]
MODEL = "mock"
_PLENTY = 100_000_000


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    url: str
    key: str
    pid: int
    environment: dict[str, str]

    @property
    def server(self) -> Server:
        return Server(self.url, MODEL, self.key)

    def events(self) -> int:
        """Usage events in the database, once everything was shipped: `audit` waits for that."""
        database = Database(self.database_url)
        try:
            with database.read() as session:
                return int(session.scalar(select(func.count()).select_from(UsageEventRow)) or 0)
        finally:
            database.close()

    @property
    def database_url(self) -> str:
        data = Path(self.environment["TOLLHOUSE_DATA_DIR"])
        return self.environment.get("TOLLHOUSE_DATABASE_URL") or f"sqlite:///{data}/tollhouse.db"

    def resident_kib(self) -> int:
        """Of the gateway processes: the leader's own and its children's."""
        pids = [self.pid]
        for listed in Path(f"/proc/{self.pid}/task").glob("*/children"):
            pids += [int(each) for each in listed.read_text().split()]
        return sum(_resident_kib(pid) for pid in pids)

    def audit(self) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli.main", "audit", "--json"],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if not done.stdout:
            raise RuntimeError(f"the audit said nothing: {done.stderr[-500:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextlib.contextmanager
def own_gateway(
    home: Path,
    upstream: str,
    *,
    workers: int = 1,
    settings: dict[str, str] | None = None,
    checkout: Path = ROOT,
    python: str = sys.executable,
) -> Iterator[GatewayProcess]:
    """`checkout`: the version to run, and to write its limits by its own tables. `python`: what runs
    it, with its dependencies installed."""
    home.mkdir(parents=True, exist_ok=True)
    entry = {"url": upstream, "model": MODEL, "tokenizer": str(MODEL_DIR), "name": "mock"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    environment = kept | {
        "TOLLHOUSE_DATA_DIR": str(home),
        "TOLLHOUSE_PORT": "0",
        "TOLLHOUSE_WORKERS": str(workers),
        "TOLLHOUSE_PIN_WORKERS": "true",
        "TOLLHOUSE_UPSTREAMS": json.dumps([entry]),
        "TOLLHOUSE_DRAIN_TIMEOUT_S": "2",
        "TOLLHOUSE_DEMO_TENANT": "always",
        "TOLLHOUSE_LOG_LEVEL": "error",
        **(settings or {}),
    }
    process = subprocess.Popen(
        [python, "-m", "gateway.cli.main", "serve"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("our gateway did not start")
        key = (home / "demo-key").read_text().strip()
        gateway = GatewayProcess(json.loads(line)["url"], key, process.pid, environment)
        opened = "import sys; from benchmarks.gateway_load.own import _open_wide; _open_wide(sys.argv[1])"
        subprocess.run(
            [sys.executable, "-c", opened, gateway.database_url], cwd=checkout, check=True
        )
        yield gateway
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def _open_wide(url: str) -> None:
    """Limits of all four scopes and a budget, each counted and none reached."""
    database, clock = Database(url), SystemClock()
    with database.transaction() as session:
        tenant = session.scalars(select(Tenant).where(Tenant.name == "demo")).one()
        key = session.scalars(select(ApiKey).where(ApiKey.tenant_id == tenant.id)).first()
        scope = scope_of_operator(tenant.id, "benchmark")
        for of in (Scope.TENANT, Scope.PROJECT, Scope.KEY, Scope.MODEL):
            for unit in (Unit.REQUESTS, Unit.TOTAL_TOKENS):
                set_rule(session, scope, clock, LimitRule(of, unit, _PLENTY))
        assert key is not None
        budgets.create(
            session,
            clock,
            tenant_id=tenant.id,
            scope="tenant",
            scope_id=tenant.id,
            cap=Money(units_of("1000000"), "USD"),
        )
    database.close()


def _resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0
