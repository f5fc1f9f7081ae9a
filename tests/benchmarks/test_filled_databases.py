"""The benchmarks' databases fill by the schema of today, and their sums agree."""

import json

import pytest
from sqlalchemy import text

from benchmarks import audit, billing_data, pages_data
from billing.pricing import prices
from core.clock import FakeClock
from core.database import Database

EVENTS = 600
_SUMS = "select sum(requests), sum(output_tokens), sum(amount) from {}"


def sums(database: Database, table: str) -> tuple[int, ...]:
    with database.read() as session:
        return tuple(int(each) for each in session.execute(text(_SUMS.format(table))).one())


def hours(database: Database) -> set[tuple[object, ...]]:
    with database.read() as session:
        return {tuple(row) for row in session.execute(text("select * from usage_hourly"))}


def test_the_history_of_the_billing_benchmark(postgres_database: Database) -> None:
    database, clock = postgres_database, FakeClock()
    with database.transaction() as session:
        version = prices.ensure_default_prices(session, clock, "demo").id
    start = clock.now().replace(day=1, hour=0, minute=0)
    billing_data.fill_history(database, version, start, 3, EVENTS, lambda *_: None)
    charged = sums(database, "charges")
    assert charged[0] == EVENTS and charged[2] > 0
    assert sums(database, "usage_hourly") == sums(database, "usage_daily") == charged
    assert sums(database, "usage_tenant_daily") == charged
    kept = hours(database)
    with database.transaction() as session:
        session.execute(text("truncate usage_hourly, usage_daily, usage_tenant_daily"))
    billing_data.fill_history(database, version, start, 3, EVENTS, lambda *_: None, raw=False)
    assert hours(database) == kept
    assert sums(database, "usage_daily") == sums(database, "usage_tenant_daily") == charged
    assert sums(database, "charges") == charged


def test_the_closed_day_of_the_audit_benchmark_is_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["audit", "--events", str(EVENTS), "--tenants", "3"])
    assert audit.main() == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["benchmark"] for each in found] == [
        "audit.hourly_audit_open_day",
        "audit.full_audit_closed_day",
        "audit.hourly_audit",
        "audit.close_day",
        "audit.usage_page_p95",
    ]


def test_the_history_of_the_pages_benchmark(postgres_database: Database) -> None:
    database = postgres_database
    pages_data.fill(database, FakeClock(), EVENTS, lambda *_: None)
    hourly = sums(database, "usage_hourly")
    assert hourly[0] == EVENTS and hourly[2] > 0
    assert sums(database, "usage_daily") == sums(database, "usage_tenant_daily") == hourly
    assert sums(database, "usage_engine_daily") == sums(database, "usage_end_user_daily") == hourly
    assert sums(database, "charges")[0] > 0
