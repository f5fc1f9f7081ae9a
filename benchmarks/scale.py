"""What a usage event costs on each store, and a billion of them a day on paper:
`python -m benchmarks.scale`. One JSON line for each figure of docs/scale.md.

--events 1000000 takes about five minutes on two cores. PostgreSQL ingests and rates them as a gateway
and a worker do; NATS JetStream takes and gives them back; ClickHouse's engine (chdb, in this process)
stores them as the archive does. What does not answer or is not installed is left out. Cores on paper
come from the processor time of this process and of PostgreSQL's backends, which other work on the
machine changes little; that of PostgreSQL's background writers and of the NATS server is not in it.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import select, text

from benchmarks.billing import Bench, bench_on, ingest, rate_all
from benchmarks.billing_data import make_events
from benchmarks.report import figure, progress
from billing.archive.clickhouse import ClickHouseArchive
from billing.archive.columns import CHARGE_COLUMNS, EVENT_COLUMNS, HOURS, ROWS
from billing.usage.raw_rows import Rows
from billing.usage.tables import Charge, UsageEventRow
from gateway.metering.streams.base import StreamDown, UsageStream
from gateway.metering.streams.messages import batch_of, read
from gateway.metering.streams.opening import StreamSink, open_stream
from gateway.metering.usage_sink import SqlUsageSink

A_DAY = 1_000_000_000
PEAK = 3.0  # the busiest hour beside the mean: 35,000 events/s
_PART = 100_000
_STREAM_EVENTS = 200_000
_TABLES = ("usage_events", "charges", "engine_receipts")


@dataclass(frozen=True)
class Prices:
    """Money of one's own provider; the defaults are round list prices of large clouds."""

    core_hour: float
    gb_month: float


@dataclass
class Measured:
    seconds: dict[str, float]  # of one event, by step
    cpu: dict[str, float]  # processor seconds of one event, by step
    bytes: dict[str, float]  # of one event, by store


def main() -> None:
    given = _arguments()
    settings: dict[str, Any] = {"events": given.events, "tenants": given.tenants}
    settings["machine_was_busy"] = given.busy
    measured = Measured({}, {}, {})
    with bench_on(given.tenants) as bench:
        _postgres(bench, given.events, measured)
        _archive(bench, measured)
        _stream(bench, given.nats, measured)
    for name, seconds in measured.seconds.items():
        figure(f"scale.{name}", 1 / seconds, "events/s", True, settings=settings)
    for name, seconds in measured.cpu.items():
        figure(f"scale.{name}_cpu", seconds * 1e6, "us/event", False, settings=settings)
    for name, size in measured.bytes.items():
        figure(f"scale.{name}_bytes", size, "bytes/event", False, settings=settings)
    prices = Prices(given.core_hour, given.gb_month)
    on_paper(measured, prices, given.days, settings)


def on_paper(measured: Measured, prices: Prices, days: int, settings: dict[str, Any]) -> None:
    """A billion events a day: cores at the mean and at the peak, storage, and money a day."""
    told = settings | {
        "days_kept": days,
        "core_hour": prices.core_hour,
        "gb_month": prices.gb_month,
    }
    per_second = A_DAY / 86_400
    cores = sum(measured.cpu.values()) * per_second
    figure("scale.billion_cores", cores, "cores", False, settings=told)
    figure("scale.billion_cores_at_peak", cores * PEAK, "cores", False, settings=told)
    for name, size in measured.bytes.items():
        stored = size * A_DAY / 1e9
        figure(f"scale.billion_{name}", stored, "GB/day", False, settings=told)
        kept = stored * days * prices.gb_month / 30.4
        figure(f"scale.billion_{name}_money", kept, "money/day", False, settings=told)
    work = cores * 24 * prices.core_hour
    figure("scale.billion_cores_money", work, "money/day", False, settings=told)


def _postgres(bench: Bench, events: int, measured: Measured) -> None:
    """In parts, as they arrive, so that the table has its size when the last part comes."""
    ingested = rated = 0.0
    cpu = {"ingest": 0.0, "rate": 0.0}
    done = 0
    while done < events:
        part = min(_PART, events - done)
        before = _processor_seconds(bench)
        ingested += ingest(bench, part)
        between = _processor_seconds(bench)
        rated += rate_all(bench)
        after = _processor_seconds(bench)
        cpu["ingest"] += between - before
        cpu["rate"] += after - between
        done += part
        progress(
            f"  postgresql: {done:,} of {events:,}, {done / ingested:,.0f}/s in,"
            f" {done / rated:,.0f}/s rated"
        )
    measured.seconds["postgresql_ingest"] = ingested / events
    measured.seconds["postgresql_rate"] = rated / events
    for step, seconds in cpu.items():
        measured.cpu[f"postgresql_{step}"] = seconds / events
    with bench.database.read() as session:
        for table in _TABLES:
            size = session.scalar(
                text("select sum(pg_total_relation_size(relid)) from pg_partition_tree(:name)"),
                {"name": table},
            )
            measured.bytes[f"postgresql_{table}"] = float(size or 0) / events


def _processor_seconds(bench: Bench) -> float:
    """Of this process and of the database's backends, which live as long as the pool. `ingest` makes
    its events in this process too: some microseconds each."""
    with bench.database.read() as session:
        query = text("select pid from pg_stat_activity where datname = current_database()")
        backends = session.scalars(query).all()
    ticks = 0
    for pid in backends:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _archive(bench: Bench, measured: Measured) -> None:
    if find_spec("chdb") is None:
        progress("  chdb is not installed: no ClickHouse")
        return
    with tempfile.TemporaryDirectory() as folder:
        client = _Chdb(Path(folder))
        archive = ClickHouseArchive(client)
        archive.identity()  # makes the tables
        day = bench.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
        spent, count, cpu = 0.0, 0, 0.0
        for rows in _stored(bench):
            began, used = time.perf_counter(), time.process_time()
            archive.store(day, rows)
            spent += time.perf_counter() - began
            cpu += time.process_time() - used
            count += len(rows)
        began, used = time.perf_counter(), time.process_time()
        archive.sum_hours(day)
        hours, hours_cpu = time.perf_counter() - began, time.process_time() - used
        progress(
            f"  clickhouse: {count:,} events with charges in {spent:.0f} s, hours in {hours:.1f} s"
        )
        measured.seconds["clickhouse_hours"] = hours / count
        measured.cpu["clickhouse_hours"] = hours_cpu / count
        measured.seconds["clickhouse_archive"] = spent / count
        measured.cpu["clickhouse_archive"] = cpu / count
        for name, table in (("rows", ROWS), ("hours", HOURS)):
            client.command(f"optimize table {table} final")
            query = (
                "select sum(bytes_on_disk) from system.parts where active and table = {t:String}"
            )
            [(size,)] = client.rows(query, {"t": table})
            measured.bytes[f"clickhouse_{name}"] = float(size) / count
        client.close()


def _stored(bench: Bench) -> Iterator[Rows]:
    event, charge = UsageEventRow, Charge
    columns = [getattr(event, name) for name in EVENT_COLUMNS]
    columns += [getattr(charge, name) for name in CHARGE_COLUMNS]
    chosen = select(*columns).outerjoin(charge, charge.request_id == event.request_id)
    with bench.database.read() as session:
        found = session.execute(chosen.execution_options(yield_per=_PART))
        for part in found.partitions():
            yield [tuple(row) for row in part]


class _Chdb:
    """The engine in this process; rows go in as Arrow, since a server takes columns too."""

    def __init__(self, folder: Path) -> None:
        from chdb.session import Session

        self._session: Any = Session(str(folder))

    def ping(self) -> None:
        self.command("select 1")

    def command(self, statement: str) -> None:
        self._session.query(statement)

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None:
        import pyarrow

        arrays = [pyarrow.array(values) for values in zip(*rows, strict=True)]
        sent = pyarrow.table(arrays, names=list(columns))  # noqa: F841  read by name below
        self._session.query(
            f"insert into {table} ({', '.join(columns)}) select * from Python(sent)"
        )

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        found = self._session.query(query, "ArrowTable", params=dict(parameters))
        yield from zip(*(column.to_pylist() for column in found.columns), strict=True)

    def close(self) -> None:
        self._session.close()


def _stream(bench: Bench, url: str, measured: Measured) -> None:
    if find_spec("nats") is None:
        progress("  nats-py is not installed: no stream")
        return
    name = f"bench_{os.getpid()}"
    stream = open_stream(f"{url}?stream={name}")
    try:
        _through(stream, bench, measured)
        asyncio.run(_delete_stream(url, name))
    except StreamDown as error:
        progress(f"  no stream: {error}")
    finally:
        stream.close()


async def _delete_stream(url: str, name: str) -> None:
    import nats

    client = await nats.connect(url)
    await client.jetstream().delete_stream(name)
    await client.close()


def _through(stream: UsageStream, bench: Bench, measured: Measured) -> None:
    events = make_events(_STREAM_EVENTS, bench.tenants, bench.version, bench.clock.now())
    sink = StreamSink(stream, SqlUsageSink(bench.database, bench.clock))
    stream.lag()  # connects
    began, used = time.perf_counter(), time.process_time()
    for first in range(0, len(events), 5000):
        sink.record(batch_of(("usage", each) for each in events[first : first + 5000]))
    published = time.perf_counter() - began
    measured.cpu["nats_publish"] = (time.process_time() - used) / len(events)
    began, used, got = time.perf_counter(), time.process_time(), 0
    while got < len(events):
        found = stream.fetch(200, 5.0)
        got += len(read(each.body for each in found).records)
        stream.acknowledge(found)
    taken = time.perf_counter() - began
    progress(f"  nats: {got:,} events out in {published:.1f} s and in in {taken:.1f} s")
    measured.cpu["nats_fetch"] = (time.process_time() - used) / got
    measured.seconds["nats_publish"] = published / got
    measured.seconds["nats_fetch"] = taken / got


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--days", type=int, default=30, help="days that each store keeps")
    parser.add_argument("--core-hour", type=float, default=0.04, help="price of a core for an hour")
    parser.add_argument(
        "--gb-month", type=float, default=0.10, help="price of a gigabyte for a month"
    )
    parser.add_argument("--busy", action="store_true", help="say that the machine does other work")
    return parser.parse_args()


if __name__ == "__main__":
    main()
