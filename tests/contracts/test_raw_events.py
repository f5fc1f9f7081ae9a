"""What exports and the usage API read of raw events and charges: from PostgreSQL, from ClickHouse, and
from both where retention has moved a part. The engine is ClickHouse's own, in this process.

Each figure is computed here from the events as they were sent.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from billing import partitions, reconcile, usage_buckets
from billing.archive.base import RawArchive, Rows
from billing.archive.clickhouse import ClickHouseArchive
from billing.archive.opening import make_archive
from billing.exports.encoding import columns_of, rows_of
from billing.exports.subjects import Period
from billing.usage_buckets import BucketQuery, Width
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.errors import BadRequest, Conflict, DependencyDown, SettingError
from core.events import UsageEvent
from core.ids import use_sources
from core.settings import Settings
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.cli.doctor import storage
from gateway.cli.doctor.check import Health
from tests.billing.conftest import Deployment, deployment_of
from tests.contracts.chdb_client import chdb_client

START = datetime(2026, 1, 20, tzinfo=UTC)
WHOLE = Period(START - timedelta(days=5), START + timedelta(days=60))


@dataclass
class Bench:
    deployment: Deployment
    events: list[UsageEvent]

    def rows(
        self, what: str, scope: TenantScope | None, period: Period = WHOLE
    ) -> list[dict[str, Any]]:
        names = [column.name for column in columns_of(what)]
        with self.deployment.database.read() as session:
            return [
                dict(zip(names, row, strict=True)) for row in rows_of(session, what, scope, period)
            ]

    def buckets(self, tenant: str, **query: Any) -> list[tuple[datetime, dict[str, Any], Any]]:
        wanted = BucketQuery(WHOLE.start, WHOLE.end, **{"limit": 180, **query})
        with self.deployment.database.read() as session:
            page = usage_buckets.usage_buckets(session, scope(tenant), wanted)
        return [(bucket.start, row.group, row) for bucket in page.buckets for row in bucket.rows]


def scope(tenant: str) -> TenantScope:
    return scope_of_operator(tenant, "test")


def fill(deployment: Deployment) -> list[UsageEvent]:
    """Two months, two tenants, one failed request, and one that a batch made."""
    with deployment.database.transaction() as session:
        partitions.ensure_ahead(session, deployment.clock.now())
    deployment.tenant("globex")
    made: list[UsageEvent] = []
    for month in range(2):
        for number in range(6):
            one = deployment.event(
                tenant_id="globex" if number == 5 else "acme",
                model="small" if number % 2 else "large",
                input_tokens=100 + number,
                cached_tokens=10,
                output_tokens=7 + month,
                status=500 if number == 4 else 200,
                batch_job="batch_1" if number == 3 else None,
                end_user="ada" if number == 0 else None,
            )
            made.append(one)
            deployment.clock.advance(seconds=30)
        deployment.record(*made[-6:])
        deployment.rate()
        if month == 0:
            deployment.clock.advance(days=2)
            assert reconcile.close_days(deployment.database, deployment.clock)
            deployment.clock.advance(days=20)
    return made


def retain(deployment: Deployment) -> int:
    with deployment.database.transaction() as session:
        return partitions.drop_before(session, deployment.clock.now(), deployment.clock.now())


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[ClickHouseArchive]:
    pytest.importorskip("chdb")
    with chdb_client(tmp_path / "clickhouse") as client:
        yield ClickHouseArchive(client)


@pytest.fixture
def with_archive(postgres_database: Database, archive: RawArchive) -> Iterator[Deployment]:
    clock = FakeClock(START)
    database = Database(postgres_database.url, session_info={RawArchive: archive})
    with use_sources(lambda: int(clock.now().timestamp() * 1000), os.urandom):
        yield deployment_of(database, clock)
    database.close()


@pytest.fixture(params=["postgresql", "clickhouse and postgresql"])
def bench(request: pytest.FixtureRequest, with_archive: Deployment) -> Bench:
    events = fill(with_archive)
    if request.param != "postgresql":
        assert retain(with_archive) == 6
    return Bench(with_archive, events)


def test_usage_has_every_event_once_in_order(bench: Bench) -> None:
    shown = bench.rows("usage", None)
    assert [row["request_id"] for row in shown] == sorted(e.request_id for e in bench.events)
    by_id = {row["request_id"]: row for row in shown}
    for event in bench.events:
        row = by_id[event.request_id]
        for name in set(row) & set(event.__struct_fields__) - {"end_user"}:
            assert row[name] == getattr(event, name), name


def test_usage_of_a_tenant_and_of_a_period(bench: Bench) -> None:
    mine = [e for e in bench.events if e.tenant_id == "globex"]
    assert [row["request_id"] for row in bench.rows("usage", scope("globex"))] == [
        e.request_id for e in mine
    ]
    first = bench.events[1]
    narrow = Period(first.occurred_at, first.occurred_at + timedelta(seconds=60))
    assert [row["request_id"] for row in bench.rows("usage", None, narrow)] == [
        e.request_id for e in bench.events[1:3]
    ]


def test_charges_cost_what_was_charged(bench: Bench) -> None:
    shown = bench.rows("charges", scope("acme"))
    with bench.deployment.database.read() as session:
        rows = session.execute(text("select request_id, amount from charges")).all()
    stored = {row[0]: row[1] for row in rows}
    # Charges themselves stay in PostgreSQL; the event's columns come from wherever it lies.
    mine = {
        e.request_id: e for e in bench.events if e.tenant_id == "acme" and e.request_id in stored
    }
    assert len(mine) >= 8
    assert {row["request_id"]: row["amount"] for row in shown} == {
        name: int(stored[name]) for name in mine
    }
    assert all(row["model"] == mine[row["request_id"]].model for row in shown)


def test_sums_by_batch_are_those_of_the_events(bench: Bench) -> None:
    mine = [e for e in bench.events if e.tenant_id == "acme"]
    found = bench.buckets("acme", width=Width.DAY, group_by=("model", "batch"))
    assert sum(row.counts["input_tokens"] for _, _, row in found) == sum(
        e.input_tokens for e in mine
    )
    assert sum(row.counts["requests"] for _, _, row in found) == 8  # 10 less the 2 that failed
    for start, group, row in found:
        same = [
            e
            for e in mine
            if e.occurred_at.date() == start.date()
            and e.model == group["model"]
            and (e.batch_job is not None) == group["batch"]
        ]
        assert same and row.counts["output_tokens"] == sum(e.output_tokens for e in same)
    only = bench.buckets("acme", width=Width.DAY, batch=True, models=("small",))
    assert [row.counts["input_tokens"] for _, _, row in only] == [103, 103]
    with bench.deployment.database.read() as session:
        total = session.scalar(text("select sum(amount) from charges where tenant_id = 'acme'"))
    assert sum(row.amounts["amount"] for _, _, row in found) == int(total)


def test_rows_are_dropped_only_when_the_archive_has_counted_them(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = fill(with_archive)
    bench = Bench(with_archive, events)
    plain = archive._client.insert

    def _lossy(table: str, columns: Any, rows: Rows) -> None:
        plain(table, columns, rows[:-1])

    def _away(table: str, columns: Any, rows: Rows) -> None:
        raise DependencyDown("ClickHouse does not answer.")

    for broken, error in ((_lossy, Conflict), (_away, DependencyDown)):
        with monkeypatch.context() as patch:
            patch.setattr(archive._client, "insert", broken)
            with pytest.raises(error):
                retain(with_archive)
        assert len(bench.rows("usage", None)) == 12  # nothing is dropped, nothing shows twice
    assert retain(with_archive) == 6  # what a failed run has stored is replaced
    assert len(bench.rows("usage", None)) == 12
    assert len(bench.rows("charges", None)) == len(bench.rows("charges", scope("acme"))) + 2


def test_end_users_are_not_archived(with_archive: Deployment) -> None:
    bench = Bench(with_archive, fill(with_archive))
    retain(with_archive)
    named = {row["request_id"]: row["end_user"] for row in bench.rows("usage", None)}
    assert named[bench.events[0].request_id] is None  # it can no longer be erased there
    assert named[bench.events[6].request_id] == "ada"
    with pytest.raises(BadRequest, match="End users are not archived"):
        bench.buckets("acme", width=Width.DAY, group_by=("end_user",))


def test_a_column_that_a_newer_version_adds_is_made(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    fill(with_archive)
    assert archive.totals("", "z").events == 0  # makes the tables
    archive._client.command("alter table tollhouse_usage_events drop column busy_us")
    archive._is_prepared = False
    assert retain(with_archive) == 6


@pytest.mark.parametrize(
    ("events_url", "database_url", "reason"),
    [
        ("kafka://a", "postgresql://h/d", "begins with 'kafka'"),
        ("clickhouse://a", "", "SQLite drops none"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    events_url: str, database_url: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=f"TOLLHOUSE_EVENTS_URL.*{reason}"):
        make_archive(Settings(events_url=events_url, database_url=database_url))


def test_a_server_that_does_not_answer_is_named() -> None:
    pytest.importorskip("clickhouse_connect")
    settings = Settings(
        events_url="clickhouse://user:secret@127.0.0.1:1/db", database_url="postgresql://h/d"
    )
    archive = make_archive(settings)
    assert archive is not None
    finding = storage.archive(settings, SystemClock())
    assert finding.health is Health.BAD and "secret" not in finding.says
    with pytest.raises(DependencyDown, match=r"ClickHouse on 127.0.0.1 does not answer") as caught:
        archive.totals("a", "b")
    assert "secret" not in json.dumps(str(caught.value))
