"""Billing on PostgreSQL: `python -m benchmarks.billing`, one figure a row of the table in
billing/README.md. At full size (10 million events, 1,000 tenants) it takes about a quarter of an hour
on two cores and 10 GB of the database's disk; `--scale 0.02` takes half a minute. `--only workers`
measures rating alone, with one and with two processes in turns. `--only usage-page --events 100000000`
measures that page over the roll-ups of so many events, whose rows are not kept (a quarter of an hour).

It makes two databases of its own, one with little history and one with much, and drops them. What an
event costs is timed on both in turns, so that a busy machine slows both alike.
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

from benchmarks.billing_data import DAYS, fill_history, make_events, tidy
from benchmarks.billing_workers import WORKERS, alone_and_together, rating_workers
from benchmarks.report import figure, progress
from billing.exports.encoding import export_of, rows_of
from billing.exports.formats import Format, Row, encode
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from billing.pricing import prices
from billing.rating import rating
from billing.usage import usage_buckets
from core.clock import FakeClock
from core.database import Database
from core.events import EngineCount, UsageEvent
from core.ids import use_sources
from core.tenants.scope import scope_of_operator
from gateway.metering.shipper import ship_file
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_receipt, move_to_outbox
from gateway.metering.usage_sink import SqlUsageSink
from migrations.run import upgrade

POSTGRES = os.environ.get("TOLLHOUSE_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/postgres")
START = datetime(2026, 3, 1, tzinfo=UTC)
TURNS = 5
GROWTH_EVENTS = 20_000  # of one turn
SHARED_EVENTS = 200_000  # of one turn


@dataclass
class Bench:
    database: Database
    clock: FakeClock
    version: str
    tenants: int


@contextmanager
def bench_on(tenants: int) -> Iterator[Bench]:
    name = f"tollhouse_bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
        admin.execute(f"create database {name}")
    database = Database(POSTGRES.rpartition("/")[0] + f"/{name}")
    clock = FakeClock(START + timedelta(days=DAYS))
    try:
        upgrade(database)
        with database.transaction() as session:
            version = prices.ensure_default_prices(session, clock, "demo").id
        yield Bench(database, clock, version, tenants)
    finally:
        database.close()
        with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
            admin.execute(f"drop database if exists {name} with (force)")


def fill(bench: Bench, events: int, *, raw: bool = True) -> None:
    began = time.monotonic()

    def _told(done: int, of: int) -> None:
        progress(f"  {done:,} of {of:,} rated events, {time.monotonic() - began:.0f} s")

    progress(f"fill in {events:,} rated events of {bench.tenants} tenants")
    fill_history(bench.database, bench.version, START, bench.tenants, events, _told, raw=raw)


def ingest(bench: Bench, count: int) -> float:
    """Seconds from the spool file to the committed table."""
    with tempfile.TemporaryDirectory() as folder:
        file = SpoolFile(Path(folder) / "spool.db")
        events = make_events(count, bench.tenants, bench.version, bench.clock.now())
        file.commit(
            [
                statement
                for event in events
                for statement in (insert_receipt(_counted(event)), *move_to_outbox(event))
            ]
        )
        began = time.perf_counter()
        ship_file(
            file.connection,
            SqlUsageSink(bench.database, bench.clock),
            file.commit,
        )
        spent = time.perf_counter() - began
        file.close()
    return spent


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
    """Seconds in which one worker rates and posts all that waits."""
    began = time.perf_counter()
    while True:
        with bench.database.transaction() as session:
            if rating.rate(session, bench.clock).batches == 0:
                return time.perf_counter() - began


def speeds(bench: Bench, count: int) -> tuple[float, float]:
    """Events ingested and events rated a second."""
    ingest(bench, max(200, count // 10))
    rate_all(bench)
    return count / ingest(bench, count), count / rate_all(bench)


def share_out(tenants: int, count: int, settings: dict[str, object]) -> None:
    """Tells what one worker and several side by side rate, all with leases."""
    with bench_on(tenants) as bench, rating_workers(bench.database.url, bench.clock.now()) as made:

        def _ingest() -> int:
            ingest(bench, count)
            return count

        progress(f"rate {count:,} events with one and with {WORKERS} workers, in turns")
        alone, together, ratios = alone_and_together(made, _ingest, TURNS)
    told = settings | {"events_of_a_turn": count, "ratio_by_turn": [round(r, 2) for r in ratios]}
    figure(
        "billing.rate_one_worker",
        alone,
        "events/s",
        True,
        at_least=20_000,
        aim=30_000,
        settings=told,
    )
    figure(
        "billing.rate_two_workers",
        together,
        "events/s",
        True,
        "one worker",
        alone,
        at_least=1.5,
        aim=1.8,
        settings=told,
    )


def growth(few: Bench, many: Bench, count: int) -> float:
    """How many times more an event costs with much history than with little, by the median turn."""
    spent: dict[str, list[float]] = {"few": [], "many": []}
    for turn in range(TURNS + 1):
        for name, bench in (("few", few), ("many", many)):
            cost = ingest(bench, count) + rate_all(bench)
            if turn > 0:  # the first one warms both
                spent[name].append(cost)
        progress(f"  turn {turn} of {TURNS}")
    return statistics.median(spent["many"]) / statistics.median(spent["few"])


def page_query(bench: Bench, rounds: int = 200) -> float:
    """95th percentile of the query behind a usage page, milliseconds."""
    chance, spent = random.Random(5), []
    for _ in range(rounds):
        scope = scope_of_operator(f"org_{chance.randrange(bench.tenants)}")
        query = usage_buckets.BucketQuery(
            START, START + timedelta(days=31), usage_buckets.Width.DAY, ("model",), 31
        )
        began = time.perf_counter()
        with bench.database.read() as session:
            usage_buckets.usage_buckets(session, scope, query)
        spent.append((time.perf_counter() - began) * 1000)
    return statistics.quantiles(spent, n=20)[18]


def invoices(bench: Bench) -> float:
    """Seconds of the run that makes every tenant's month final."""
    bench.clock.set(datetime(2026, 4, 3, tzinfo=UTC))
    reported = 0

    def _told(done: int, of: int) -> None:
        nonlocal reported
        if done * 10 // of > reported:
            reported = done * 10 // of
            progress(f"  {done} of {of} tenants")

    began = time.perf_counter()
    result = invoice_run.run(bench.database, bench.clock, current=False, progress=_told)
    spent = time.perf_counter() - began
    if len(result.finalised) < bench.tenants or result.failed:
        raise SystemExit(f"only {len(result.finalised)} invoices; failed: {result.failed}")
    return spent


def focus_export(bench: Bench, form: Format = Format.CSV) -> tuple[float, int]:
    """Rows a second of a FOCUS file over all tenants, and rows written."""
    rows, export = 0, export_of("focus")
    period = Period(START, START + timedelta(days=31))
    began = time.perf_counter()
    with bench.database.read() as session:

        def _counted_rows() -> Iterator[Row]:
            nonlocal rows
            for row in rows_of(session, export, None, period):
                rows += 1
                yield row

        for _ in encode(_counted_rows(), export.columns, form):
            pass
    return rows / (time.perf_counter() - began), rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full sizes")
    parser.add_argument("--only", choices=["workers", "usage-page"], help="one part of it")
    parser.add_argument("--events", type=int, default=100_000_000, help="of the usage page")
    wanted = parser.parse_args()

    def _size(full: int) -> int:
        return max(1000, int(full * wanted.scale))

    tenants = max(10, int(1000 * wanted.scale))
    settings: dict[str, object] = {
        "database": "postgresql",
        "scale": wanted.scale,
        "tenants": tenants,
    }

    def _tell(
        name: str, value: float, unit: str, more: bool, least: float, aim: float, **of: object
    ) -> None:
        figure(
            f"billing.{name}", value, unit, more, at_least=least, aim=aim, settings=settings | of
        )

    if wanted.only == "usage-page":
        with bench_on(tenants) as rolled_up:
            fill(rolled_up, wanted.events, raw=False)
            p95 = page_query(rolled_up)
            _tell("usage_page_p95_rolled_up", p95, "ms", False, 150, 50, rows=wanted.events)
        return 0
    share_out(tenants, _size(SHARED_EVENTS), settings)
    if wanted.only == "workers":
        return 0
    few_rows, many_rows = _size(100_000), _size(10_000_000)
    with bench_on(tenants) as many, use_sources(_millis(many), random.Random(1).randbytes):
        with bench_on(tenants) as few:
            fill(few, few_rows)
            progress(f"ingest and rate {few_rows:,} events")
            ingested, rated = speeds(few, few_rows)
            _tell("ingest", ingested, "events/s", True, 15_000, 30_000)
            _tell("rate", rated, "events/s", True, 10_000, 25_000)
            fill(many, many_rows)
            tidy(few.database)
            progress("ingest and rate on top of little and of much history, in turns")
            cost = growth(few, many, min(GROWTH_EVENTS, few_rows))
            _tell("growth", cost, "times the cost an event", False, 1.3, 1.0, rows=many_rows)
        progress("usage pages")
        _tell("usage_page_p95", page_query(many), "ms", False, 100, 30, rows=many_rows)
        progress(f"invoice run over {tenants} tenants")
        _tell("invoice_run", invoices(many), "s", False, 60, 20, events=many_rows)
        progress("FOCUS export")
        speed, rows = focus_export(many)
        _tell("focus_export", speed, "rows/s", True, 20_000, 50_000, rows=rows)
    return 0


def _millis(bench: Bench) -> Callable[[], int]:
    """Ids of the fake clock's time, each a millisecond later, as live traffic makes them."""
    made = [0]

    def _next() -> int:
        made[0] += 1
        return int(bench.clock.now().timestamp() * 1000) + made[0]

    return _next


if __name__ == "__main__":
    sys.exit(main())
