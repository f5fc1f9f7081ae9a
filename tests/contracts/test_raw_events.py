"""What exports and the usage API read of raw events and charges: from PostgreSQL, from ClickHouse, and
from both where retention has moved a part. The engine is ClickHouse's own, in this process.

Each figure is computed here from the events as they were sent.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from billing.archive.opening import make_archive
from billing.audit import reconcile
from billing.closing import moving
from billing.exports.encoding import export_of, rows_of
from billing.exports.subjects import Period
from billing.usage import partitions, service_rollups, usage_buckets
from billing.usage.raw_rows import RawArchive
from billing.usage.usage_buckets import BucketQuery, Width
from core.clock import SystemClock
from core.database import Database
from core.errors import DependencyDown, SettingError
from core.events import UsageEvent
from core.settings import Settings
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.cli.doctor import storage
from gateway.cli.doctor.check import Health
from tests.billing.conftest import Deployment
from tests.contracts.conftest import START, archive_in, deployment_with
from tests.postgres_copies import Copies

WHOLE = Period(START - timedelta(days=5), START + timedelta(days=60))


@dataclass
class Bench:
    deployment: Deployment
    events: list[UsageEvent]
    charged: dict[str, int]  # picounits by request, as rated

    def rows(
        self, what: str, scope: TenantScope | None, period: Period = WHOLE
    ) -> list[dict[str, Any]]:
        names = [column.name for column in export_of(what).columns]
        with self.deployment.database.read() as session:
            return [
                dict(zip(names, row, strict=True))
                for row in rows_of(session, export_of(what), scope, period)
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
        service_rollups.sum_all(deployment.database, deployment.clock)
        if month == 0:
            deployment.clock.advance(days=2)
            assert reconcile.close_days(deployment.database, deployment.clock)
            deployment.clock.advance(days=20)
    return made


def move(deployment: Deployment, archive: RawArchive) -> int:
    """Move every closed day, and drop the rows; returns how many events were dropped."""
    now = deployment.clock.now()
    moving.move_days(deployment.database, archive, now, 1)
    return moving.drop_moved(deployment.database, archive, now + moving.DROPPED_AFTER)


@pytest.fixture(
    scope="module", params=["postgresql", "moved, not yet dropped", "clickhouse and postgresql"]
)
def bench(
    request: pytest.FixtureRequest,
    postgres_copies: Copies,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """The tests only read it."""
    name = postgres_copies.take()
    with (
        archive_in(tmp_path_factory.mktemp("archive")) as archive,
        deployment_with(postgres_copies.url(name), archive) as made,
    ):
        events = fill(made)
        with made.database.read() as session:
            rows = session.execute(text("select request_id, amount from charges")).all()
        if request.param == "clickhouse and postgresql":
            assert move(made, archive) == 6
        elif request.param == "moved, not yet dropped":
            moving.move_days(made.database, archive, made.clock.now(), 1)
        yield Bench(made, events, {row[0]: int(row[1]) for row in rows})
    postgres_copies.give_back(name)


def test_usage_has_every_event_once_in_order(bench: Bench) -> None:
    shown = bench.rows("usage", None)
    assert [row["request_id"] for row in shown] == sorted(e.request_id for e in bench.events)
    by_id = {row["request_id"]: row for row in shown}
    for event in bench.events:
        row = by_id[event.request_id]
        for name in set(row) & set(event.__struct_fields__):
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
    stored = bench.charged
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
    total = sum(bench.charged[event.request_id] for event in mine)
    assert sum(row.amounts["amount"] for _, _, row in found) == total


@pytest.mark.parametrize("other", ["batch", "end_user"])  # from hourly sums, and from rows
def test_usage_without_an_adapter_is_found_by_an_empty_name(bench: Bench, other: str) -> None:
    found = bench.buckets("acme", width=Width.DAY, adapters=("",), group_by=(other,))
    assert sum(row.counts["requests"] for _, _, row in found) == 8
    assert bench.buckets("acme", width=Width.DAY, adapters=("one",), group_by=(other,)) == []


@pytest.mark.parametrize("other", ["batch", "end_user"])  # from hourly sums, and from rows
def test_sums_by_currency_are_what_was_charged(bench: Bench, other: str) -> None:
    found = bench.buckets("acme", width=Width.DAY, group_by=("currency", other))
    amounts: dict[str | None, int] = {}
    for _, group, row in found:
        currency = group["currency"]
        amounts[currency] = amounts.get(currency, 0) + row.amounts["amount"]
    mine = [e.request_id for e in bench.events if e.tenant_id == "acme"]
    assert amounts.pop("USD") == sum(bench.charged[name] for name in mine)
    assert not any(amounts.values())


@pytest.mark.parametrize(
    ("events_url", "database_url", "reason"),
    [
        ("kafka://a", "postgresql://h/d", "begins with 'kafka'"),
        ("clickhouse://a", "", "SQLite keeps all"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    events_url: str, database_url: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=f"TOLLHOUSE_EVENTS_URL.*{reason}"):
        make_archive(Settings(events_url=events_url, database_url=database_url))


def test_a_server_that_does_not_answer_is_named(postgres_database: Database) -> None:
    pytest.importorskip("clickhouse_connect")
    settings = Settings(
        events_url="clickhouse://user:secret@127.0.0.1:1/db", database_url=postgres_database.url
    )
    archive = make_archive(settings)
    assert archive is not None
    finding = storage.archive(settings, SystemClock())
    assert finding.health is Health.BAD and "secret" not in finding.says
    with pytest.raises(DependencyDown, match=r"ClickHouse on 127.0.0.1 does not answer") as caught:
        archive.identity()
    assert "secret" not in json.dumps(str(caught.value))
