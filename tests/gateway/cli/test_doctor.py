"""The doctor finds what is wrong and says what to do; nothing it looks at can hang it."""

import json
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from billing.pricing import prices
from billing.usage.tables import UsageBatch
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.heartbeat_models import QueueHeartbeat
from core.queue import QUEUES
from core.settings import Settings
from core.tenants.models import Tenant
from gateway.cli.doctor import command as doctor
from gateway.cli.doctor import dependencies, packages, storage
from gateway.cli.doctor.check import Finding, Health, good, run_checks
from gateway.cli.main import main
from migrations.run import downgrade
from moderation.classifiers import compiled
from tests.migrated import migrated


def settings(tmp_path: Path, **given: Any) -> Settings:
    return Settings(data_dir=tmp_path, **given)


def test_an_empty_database_needs_no_repair(tmp_path: Path) -> None:
    found = storage.database(settings(tmp_path), FakeClock())
    assert (found.health, "empty" in found.says) == (Health.WARN, True)
    assert storage.failed_items(settings(tmp_path), FakeClock()).health is Health.UNUSED
    assert storage.data_directory(settings(tmp_path), FakeClock()).health in (
        Health.GOOD,
        Health.WARN,
    )


@pytest.mark.parametrize(
    ("found", "last", "status"),
    [
        (["good", "unused"], "Everything in use works.", 0),
        (["good", "warn", "warn"], "These need a look: part 1, part 2.", 0),
        (["warn", "bad", "good"], "These checks failed: part 1.", 1),
    ],
)
def test_the_last_line_names_what_is_not_well(
    found: list[str],
    last: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    findings = {f"part {n}": Finding(Health(each), "so") for n, each in enumerate(found)}
    checks = {part: lambda *_, finding=finding: finding for part, finding in findings.items()}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("options", "prefix", "health"),
    [
        ("'--enable-shared'", "/opt/python", Health.WARN),
        ("'--enable-optimizations' '--with-lto'", "/usr/local", Health.GOOD),  # the official image
        ("'--enable-shared' '--prefix=/usr'", "/usr", Health.GOOD),  # Debian's says nothing of it
        (None, "C:\\Python311", Health.WARN),
    ],
)
def test_an_unoptimised_interpreter_is_reported(
    options: str | None, prefix: str, health: Health
) -> None:
    found = packages.judge("3.11.7", {"CONFIG_ARGS": options, "prefix": prefix})
    assert (found.health, bool(found.next_step)) == (health, health is Health.WARN)


@pytest.mark.parametrize(("built", "health"), [(True, Health.GOOD), (False, Health.WARN)])
def test_a_classifier_without_its_extension_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool, health: Health
) -> None:
    monkeypatch.setattr(compiled, "Kernel", object if built else None)
    assert packages.classifier(settings(tmp_path), FakeClock()).health is health


def test_an_old_schema_is_told(database_url: str, tmp_path: Path) -> None:
    made = settings(tmp_path, database_url=database_url)
    database = migrated(database_url)
    assert storage.database(made, SystemClock()).health is Health.GOOD
    assert storage.clock_skew(made, SystemClock()).health is Health.GOOD
    assert storage.failed_items(made, SystemClock()).health is Health.GOOD
    downgrade(database, "0009_audit_log_erasure")
    found = storage.database(made, SystemClock())
    assert (found.health, found.next_step) == (Health.BAD, "Run `tollhouse migrate`.")
    database.close()


def test_a_spool_that_nobody_ships_is_told(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    with sqlite3.connect(tmp_path / "spool" / "1-a.db") as spool:
        spool.executescript(
            "create table opened (request_id, body); create table outbox (seq, topic, body);"
            "create table parked (seq, topic, body, reason); create table folded (log);"
            "insert into folded values (0); insert into outbox values (1, 'u', x'');"
        )
    spool.close()
    late = SystemClock()
    assert storage.spools(settings(tmp_path), late).health is Health.GOOD
    clock = FakeClock(late.now())
    clock.advance(hours=1)
    assert storage.spools(settings(tmp_path), clock).health is Health.WARN


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (storage.database, {"database_url": "postgresql://nobody@127.0.0.1:1/none"}),
        (dependencies.counters, {"redis_url": "redis://127.0.0.1:1/0"}),
        (dependencies.broker, {"broker_url": "amqp://guest:guest@127.0.0.1:1//"}),
        (dependencies.upstreams, {"upstreams": "http://127.0.0.1:1 tcp://127.0.0.1:2"}),
        (
            dependencies.payments,
            {"stripe_api_key": "sk_test_x", "stripe_api_base": "http://127.0.0.1:1"},
        ),
    ],
)
def test_a_server_that_is_down_is_told_with_the_next_step(
    check: Any, given: dict[str, str], tmp_path: Path
) -> None:
    (report,) = run_checks({"it": check}, settings(tmp_path, **given), FakeClock())
    assert report.finding.health is Health.BAD
    assert "TOLLHOUSE_" in report.finding.next_step


def test_what_is_not_configured_is_not_needed(tmp_path: Path) -> None:
    for check in (
        dependencies.counters,
        dependencies.broker,
        dependencies.upstreams,
        dependencies.payments,
    ):
        assert check(settings(tmp_path), FakeClock()).health is Health.UNUSED


def test_a_check_that_breaks_is_a_finding(tmp_path: Path) -> None:
    def broken(_settings: Settings, _clock: Any) -> Any:
        raise RuntimeError("no luck")

    reports = list(
        run_checks({"a": broken, "b": lambda *_: good("fine")}, settings(tmp_path), FakeClock())
    )
    assert [report.finding.health for report in reports] == [Health.BAD, Health.GOOD]
    assert "no luck" in reports[0].finding.says


def test_memory_counters_with_several_workers_are_told(tmp_path: Path) -> None:
    assert dependencies.counters(settings(tmp_path, workers=2), FakeClock()).health is Health.WARN


def test_every_kind_of_bad_usage_is_parked_and_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    made, clock = settings(tmp_path), SystemClock()
    database = migrated(made.effective_database_url)
    with database.transaction() as session:
        version = prices.ensure_default_prices(session, clock, "demo").id
        session.add(
            Tenant(id="euro", name="e", display_name="E", currency="EUR", created_at=clock.now())
        )
    database.close()
    now = clock.now()
    good_one: dict[str, Any] = {
        "request_id": "req_good",
        "tenant_id": "acme",
        "project_id": "proj",
        "key_id": "key",
        "kind": "gpu_seconds",
        "route": "/batch",
        "model": "demo",
        "adapter": None,
        "adapter_digest": None,
        "price_version": version,
        "occurred_at": now.isoformat(),
        "finished_at": now.isoformat(),
        "input_tokens": 3,
        "cached_tokens": 0,
        "output_tokens": 4,
        "waived_tokens": 0,
        "finish_reason": "stop",
        "status": 200,
    }
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"output_tokens": -1}, "invalid"),
        ({"input_tokens": 1.5}, "invalid"),
        ({"quantity": 0.5}, "invalid"),
        ({"quantity": -3}, "invalid"),
        ({"occurred_at": "2026-01-01T00:00:00"}, "invalid"),
        ({"model": "m" * 500}, "invalid"),
        ({"tenant_id": None}, "invalid"),
        ({"price_version": "price_nobody"}, "unknown_price"),
        ({"occurred_at": (now + timedelta(days=1)).isoformat()}, "future"),
        ({"tenant_id": "euro"}, "currency"),
    ]
    lines = [json.dumps(good_one), "no JSON at all", "[1, 2]"]
    lines += [
        json.dumps({**good_one, "request_id": f"req_{number}", **change})
        for number, (change, _) in enumerate(wrong)
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(lines))
    for new in (13, 0):  # importing it again changes nothing
        assert main(["usage", "import", str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"new": new, "parked": 12}
    assert main(["usage", "parked", "--json"]) == 0
    rows = {row["request_id"]: row for row in json.loads(capsys.readouterr().out)}
    for number, (_, code) in enumerate(wrong):
        row = rows.pop(f"req_{number}")
        assert row["code"] == code and row["reason"]
    assert {row["code"] for row in rows.values()} == {"invalid"} and len(rows) == 2
    found = storage.failed_items(made, clock)
    assert found.health is Health.WARN
    for words in ("12 parked", "9 invalid: ", "1 unknown_price: ", "1 future: ", "1 currency: "):
        assert words in found.says
    for request_id in [f"req_{number}" for number in range(len(wrong))] + list(rows):
        assert main(["usage", "dismiss", request_id, "--by", "finance"]) == 0
    assert storage.failed_items(made, clock).health is Health.GOOD, "somebody has decided"


def test_a_dead_worker_and_its_backlog_are_told(
    sqlite_database: Database, tmp_path: Path, clock: FakeClock
) -> None:
    made = settings(tmp_path, database_url=sqlite_database.url, broker_url="amqp://h/")
    assert storage.tasks(made, clock).health is Health.WARN  # nothing has run yet
    with sqlite_database.transaction() as session:
        for queue in QUEUES:
            session.add(QueueHeartbeat(queue=queue, at=clock.now()))
    assert storage.tasks(made, clock).health is Health.GOOD
    with sqlite_database.transaction() as session:
        session.add(UsageBatch(recorded_at=clock.now(), events=3))
    clock.advance(minutes=6)
    found = storage.tasks(made, clock)
    assert found.health is Health.BAD and "tollhouse worker" in found.next_step
    assert "rating silent for 360 s" in str(found) and "since 360 s" in str(found)
    with sqlite_database.transaction() as session:
        for queue in QUEUES:
            session.merge(QueueHeartbeat(queue=queue, at=clock.now()))
    assert storage.tasks(made, clock).health is Health.BAD  # it lives, and does not keep up
