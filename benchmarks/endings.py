"""Ten thousand mixed requests, a third of which fail in every way; then the audit must be clean.

    python -m benchmarks.endings [--requests 10000] [--at-once 24] [--kills 3]

One gateway of two workers on Redis, two upstreams, one with and one without a tokenizer, that cut,
merge, delay and misreport their answers. Requests that an upstream fails are a tenant's of their own:
the circuit breakers that they open must refuse nobody else. Between the requests a worker is killed
(-9) some times. Figures: what the audit finds, good requests that were refused with 503, requests
that are still open, answers whose usage is not the ledger's (as their clients read it), and gateways'
records that could not be stored. stderr has the table of failures with the statuses that clients saw.
Needs Redis on its standard local port.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from benchmarks.ending_load.client import Answered, ask_all
from benchmarks.ending_load.requests import BLOCKED, WITH_TOKENIZER, WITHOUT, Keys, asked
from benchmarks.gateway_load.own import ROOT, GatewayProcess, own_gateway
from benchmarks.report import figure, progress
from billing.notices import budgets
from core.clock import SystemClock
from core.database import Database
from core.money import Money
from core.tenants import keys
from core.tenants.limits import set_rule
from core.tenants.models import Tenant
from core.tenants.organisations import create_project, create_tenant
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from engine.demo.paths import MODEL_DIR

REDIS = "redis://127.0.0.1:6379/9"
_RECOVERY_S = 90.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endings", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument(
        "--kills", type=int, default=3, help="of a worker, spread over the requests"
    )
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tollhouse-bench-") as home, _upstreams() as entries:
        settings = {
            "TOLLHOUSE_UPSTREAMS": json.dumps(entries),
            "TOLLHOUSE_REDIS_URL": REDIS,
            "TOLLHOUSE_PIN_WORKERS": "false",
        }
        with own_gateway(Path(home), entries[0]["url"], workers=2, settings=settings) as gateway:
            made = _tenants(gateway)
            began = time.monotonic()
            seen = asyncio.run(_load(gateway, made, chosen))
            details = {"requests": chosen.requests, "kills": chosen.kills}
            details["seconds"] = round(time.monotonic() - began)
            return _judge(gateway, seen, details)


@contextlib.contextmanager
def _upstreams() -> Iterator[list[dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.gateway.scripted_upstream"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        shared = {
            "context_length": 8192,
            "url": url,
            "capabilities": ["embeddings"],
            "shared_cache": True,
        }
        counted = {"name": "one", "model": WITH_TOKENIZER, "tokenizer": str(MODEL_DIR)}
        yield [shared | counted, shared | {"name": "two", "model": WITHOUT}]
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


def _tenants(gateway: GatewayProcess) -> Keys:
    """A key that is limited, one whose project has no money, and a policy that blocks a word."""
    database, clock = Database(gateway.database_url), SystemClock()
    try:
        with database.transaction() as session:
            tenant = session.scalars(select(Tenant).where(Tenant.name == "demo")).one().id
            scope = scope_of_operator(tenant, "benchmark")
            limited = create_project(session, scope, clock, name="limited").id
            spent = create_project(session, scope, clock, name="spent").id
            found = [
                keys.issue(session, scope, clock, project_id=each, name=each).secret
                for each in (limited, spent)
            ]
            once = LimitRule(Scope.PROJECT, Unit.REQUESTS, 1, target=limited)
            set_rule(session, scope, clock, once)
            found.append(_failing_tenant(session, clock))
            _without_money(session, clock, tenant, spent)
    finally:
        database.close()
    _block(gateway)
    time.sleep(3)  # until every worker has read them
    return Keys(gateway.key, *found)


def _failing_tenant(session: Session, clock: SystemClock) -> str:
    scope = scope_of_operator(create_tenant(session, clock, name="failing").id, "benchmark")
    project = create_project(session, scope, clock, name="default").id
    return keys.issue(session, scope, clock, project_id=project, name="failing").secret


def _without_money(session: Session, clock: SystemClock, tenant: str, project: str) -> None:
    budgets.create(
        session, clock, tenant_id=tenant, scope="project", scope_id=project, cap=Money(1, "USD")
    )


def _block(gateway: GatewayProcess) -> None:
    """The tenant's policy denies a word."""
    document = json.loads(_command(gateway, "policy", "default", "--json"))
    document["input"]["deny"] = [BLOCKED]
    file = Path(gateway.environment["TOLLHOUSE_DATA_DIR"]) / "policy.json"
    file.write_text(json.dumps(document))
    _command(gateway, "policy", "set", str(file), "--tenant", "demo", "--json")


def _command(gateway: GatewayProcess, *words: str) -> str:
    command = [sys.executable, "-m", "gateway.cli.main", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=gateway.environment, capture_output=True, text=True, check=True
    )
    return done.stdout


async def _load(gateway: GatewayProcess, made: Keys, chosen: argparse.Namespace) -> list[Answered]:
    requests = (asked(number, made) for number in range(chosen.requests))
    kill_at = {(n + 1) * chosen.requests // (chosen.kills + 1) for n in range(chosen.kills)}
    seen: list[Answered] = []
    async for each in ask_all(gateway.url, requests, chosen.at_once):
        seen.append(each)
        if len(seen) in kill_at:
            _kill_a_worker(gateway)
        if len(seen) % max(1, chosen.requests // 10) == 0:
            progress(f"{len(seen)} requests ended")
    return seen


def _kill_a_worker(gateway: GatewayProcess) -> None:
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    workers = [
        int(pid)
        for pid in children
        if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    progress(f"killing worker {workers[0]}")
    os.kill(workers[0], signal.SIGKILL)


def _judge(gateway: GatewayProcess, seen: list[Answered], details: dict[str, Any]) -> int:
    table: dict[str, Counter[int]] = {}
    for each in seen:
        table.setdefault(each.asked.failure or "to succeed", Counter())[each.status] += 1
    for name, statuses in sorted(table.items()):
        progress(f"{name}: {dict(sorted(statuses.items()))}")
    report = _audited_once_settled(gateway)
    if not report["clean"]:
        progress(json.dumps(report, indent=1))
    failing = sum(1 for each in seen if each.asked.failure)
    wrong, compared = _wrong_usage(gateway, seen)
    figures = {
        "audit_differences": 0 if report["clean"] else max(1, len(report["differences"])),
        "lost": report["lost"],
        "duplicated": report["duplicated"],
        "open_requests": report["spool"]["running"] + report["spool"]["unshipped"],
        "parked": report["parked"] + report["spool"]["parked"],
        "wrong_usage": wrong,
        "good_refused": table.get("to succeed", Counter())[503],
    }
    details |= {
        "failing": failing,
        "events": gateway.events(),
        "answers_compared_with_the_ledger": compared,
        "statuses": {name: {str(k): v for k, v in found.items()} for name, found in table.items()},
    }
    for name, value in figures.items():
        settings = details if name == "audit_differences" else {}
        figure(f"endings.{name}", value, "", False, at_least=0, aim=0, settings=settings)
    return 1 if any(figures.values()) else 0


def _audited_once_settled(gateway: GatewayProcess) -> dict[str, Any]:
    """After the killed workers' spools have been adopted."""
    until = time.monotonic() + _RECOVERY_S
    while True:
        report = gateway.audit()
        left = report["spool"]["running"] + report["spool"]["unshipped"]
        if (report["clean"] and not left) or time.monotonic() > until:
            return report
        time.sleep(3)


def _wrong_usage(gateway: GatewayProcess, seen: list[Answered]) -> tuple[int, int]:
    """Answers whose usage, as the client read it, is not that of exactly one usage event."""
    database = Database(gateway.database_url)
    try:
        with database.read() as session:
            rows = session.execute(text("select request_id, output_tokens from usage_events"))
            stored: dict[str, list[int]] = {}
            for request_id, output in rows:
                stored.setdefault(request_id, []).append(output)
    finally:
        database.close()
    told = [each for each in seen if each.output is not None]
    wrong = [each for each in told if stored.get(each.request_id) != [each.output]]
    for each in wrong[:10]:
        progress(f"wrong: {each} {stored.get(each.request_id)}")
    return len(wrong), len(told)


if __name__ == "__main__":
    raise SystemExit(main())
