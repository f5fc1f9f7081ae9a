"""The counting-house on PostgreSQL: `python -m benchmarks.billing`. One figure a row of the table in
billing/README.md. It makes a database of its own and drops it. `--scale 0.01` is a quick look.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg

from benchmarks.billing_data import fill_history, make_events
from benchmarks.report import figure, progress
from billing import buckets, invoice_run, prices, rating
from billing.accounts import ensure_accounts
from core.clock import FakeClock
from core.database import Database
from core.events import UsageEvent
from core.ids import drawn_from
from core.tenants.scope import scope_of_operator
from gateway.books import SqlBooks
from gateway.shipper import ship_file
from gateway.spool import EngineCount, SpoolFile, closing, shipped
from migrations.run import upgrade

POSTGRES = os.environ.get("TOLLHOUSE_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/postgres")
START = datetime(2026, 3, 1, tzinfo=UTC)


@dataclass
class Bench:
    database: Database
    clock: FakeClock
    version: str
    settings: dict[str, object]


@contextmanager
def bench_on(settings: dict[str, object]) -> Iterator[Bench]:
    name = f"tollhouse_bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
        admin.execute(f"create database {name}")
    database = Database(POSTGRES.rpartition("/")[0] + f"/{name}")
    clock = FakeClock(START + timedelta(days=20))
    try:
        upgrade(database)
        with database.transaction() as session:
            version = prices.ensure_default_prices(session, clock, "demo").id
        yield Bench(database, clock, version, settings)
    finally:
        database.close()
        with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
            admin.execute(f"drop database if exists {name} with (force)")


def ingest(bench: Bench, count: int, tenants: int) -> float:
    """Events a second, from the spool file to the committed table."""
    with tempfile.TemporaryDirectory() as folder:
        file = SpoolFile(Path(folder) / "spool.db")
        events = make_events(count, tenants, bench.version, bench.clock.now())
        file.commit(
            [statement for event in events for statement in closing(event, _counted(event))]
        )
        began = time.perf_counter()
        ship_file(
            file.connection,
            SqlBooks(bench.database, bench.clock),
            lambda last: file.commit([shipped(last)]),
        )
        spent = time.perf_counter() - began
        file.close()
    return count / spent


def _counted(event: UsageEvent) -> EngineCount:
    generated = event.output_tokens + event.waived_tokens
    return EngineCount(
        event.request_id,
        event.engine_id,
        event.input_tokens,
        event.cached_tokens,
        generated,
        event.finished_at,
    )


def rate_all(bench: Bench) -> float:
    """Events a second that one worker rates and posts."""
    began, events = time.perf_counter(), 0
    while True:
        with bench.database.transaction() as session:
            rated = rating.rate(session, bench.clock)
        if rated.batches == 0:
            return events / (time.perf_counter() - began)
        events += rated.events


def speeds(bench: Bench, count: int, tenants: int) -> tuple[float, float]:
    return ingest(bench, count, tenants), rate_all(bench)


def invoices(bench: Bench, tenants: int) -> float:
    bench.clock.set(datetime(2026, 4, 3, tzinfo=UTC))
    began = time.perf_counter()
    result = invoice_run.run(bench.database, bench.clock, current=False)
    spent = time.perf_counter() - began
    if len(result.finalised) < tenants or result.failed:
        raise SystemExit(f"only {len(result.finalised)} invoices; failed: {result.failed}")
    return spent


def page_query(bench: Bench, tenants: int, rounds: int = 200) -> float:
    """95th percentile of the query behind a usage page, milliseconds."""
    chance, spent = random.Random(5), []
    for _ in range(rounds):
        scope = scope_of_operator(f"org_{chance.randrange(tenants)}")
        query = buckets.BucketQuery(
            START, START + timedelta(days=31), buckets.Width.DAY, ("model",), 31
        )
        began = time.perf_counter()
        with bench.database.read() as session:
            buckets.usage_buckets(session, scope, query)
        spent.append((time.perf_counter() - began) * 1000)
    return statistics.quantiles(spent, n=20)[18]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full sizes")
    wanted = parser.parse_args()

    def _size(full: int) -> int:
        return max(200, int(full * wanted.scale))

    tenants = max(10, int(1000 * wanted.scale))
    settings: dict[str, object] = {"database": "postgresql", "scale": wanted.scale}
    with bench_on(settings) as bench, drawn_from(_millis(bench), random.Random(1).randbytes):
        with bench.database.transaction() as session:
            ensure_accounts(session, [f"org_{n}" for n in range(tenants)], bench.clock.now())
        small = _size(100_000)
        progress(f"ingest and rate {small} events, {tenants} tenants")
        speeds(bench, max(200, small // 10), tenants)  # warm
        first = speeds(bench, small, tenants)
        _tell("billing.ingest", first[0], "events/s", True, 15_000, 30_000, settings)
        _tell("billing.rate", first[1], "events/s", True, 10_000, 25_000, settings)
        big = _size(10_000_000)
        progress(f"fill in {big} rated events; this takes minutes")
        fill_history(bench.database, bench.version, START, tenants, big)
        progress("ingest and rate the same number on top of them")
        speeds(bench, max(200, small // 10), tenants)
        second = speeds(bench, small, tenants)
        cost = sum(1 / each for each in second) / sum(1 / each for each in first)
        _tell("billing.growth", cost, "times the cost an event", False, 1.3, 1.0, settings)
        progress("usage pages")
        p95 = page_query(bench, tenants)
        _tell("billing.usage_page_p95", p95, "ms", False, 100, 30, settings)
        progress(f"invoice run over {tenants} tenants")
        spent = invoices(bench, tenants)
        _tell("billing.invoice_run", spent, "s", False, 60, 20, settings)
    return 0


def _tell(
    name: str,
    value: float,
    unit: str,
    more_is_better: bool,
    least: float,
    aim: float,
    settings: dict[str, object],
) -> None:
    figure(name, value, unit, more_is_better, at_least=least, aim=aim, settings=settings)


def _millis(bench: Bench) -> Callable[[], int]:
    """Ids of the fake clock's time, each a millisecond later, as a live house makes them."""
    made = [0]

    def _next() -> int:
        made[0] += 1
        return int(bench.clock.now().timestamp() * 1000) + made[0]

    return _next


if __name__ == "__main__":
    sys.exit(main())
