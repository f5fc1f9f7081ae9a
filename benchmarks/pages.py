"""Every page of the dashboard on PostgreSQL: `python -m benchmarks.pages`, p95 beside the limit of
100 ms, one figure a page and one for the slowest. Ten million events of a hundred tenants, three
tenths of them the viewer's; at full size about seven minutes on two cores and 6 GB of the database's
disk, nearly all of it to make the data. `--events 100000` is a look of half a minute.

The pages run in this process behind their own sign-in, middleware and thread pool; no network, no
browser. It makes a database of its own and drops it.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg

from benchmarks.pages_data import DAYS, TENANTS, fill
from benchmarks.report import figure, progress
from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.database import Database
from core.settings import load_settings
from dashboards.navigation import SECTIONS
from engine.demo.paths import MODEL_DIR
from gateway.admin.dashboard import make_dashboard
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.wiring import build
from migrations.run import upgrade

POSTGRES = os.environ.get("TOLLHOUSE_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/postgres")
LIMIT_MS = 100.0
MODEL = "tiny"
WARM = 3
PAGES = (
    *(section.path for section in SECTIONS),
    "/usage?by=member_id",
    "/usage?by=project_id",
    "/usage?by=end_user",  # of 30 days, as the other groupings
    "/usage?by=end_user&q=since:7d",
    "/usage?by=end_user&compare=1",
    "/usage?by=engine_id",
    "/usage?by=region",
    "/requests?sort=-duration_ms",
    "/requests?sort=-amount",
    "/costs?by=key_id",
    "/requests?show=failed",
    "/safety/policy",
    "/payment-methods",
    "/operator/tenants/{tenant}",
)


@contextmanager
def own_database() -> Iterator[str]:
    name = f"tollhouse_bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
        admin.execute(f"create database {name}")
        try:
            yield POSTGRES.rsplit("/", 1)[0] + f"/{name}"
        finally:
            admin.execute(f"drop database if exists {name} with (force)")


async def measure(url: str, tenant: str, data: Path, turns: int) -> dict[str, list[float]]:
    """Milliseconds of each page, the pages in turns, so that a busy moment slows all alike."""
    settings = load_settings(database_url=url, data_dir=data, moderation="off")
    codec = load_codec(MODEL_DIR)
    engine = FakeEngine(
        vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids, context_length=512
    )
    engines = Engines({MODEL: [engine]}, [ServedModel(MODEL, codec, 512, 0)])
    services = build(settings, engines=engines)
    transport = httpx.ASGITransport(app=make_dashboard(services))
    times: dict[str, list[float]] = {page: [] for page in PAGES}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://tollhouse", headers={"origin": "http://tollhouse"}
    ) as client:
        answer = await client.post("/sign-in", data={"secret": services.operator_token})
        assert answer.status_code == 303, answer.text
        for turn in range(WARM + turns):
            for page in PAGES:
                began = time.perf_counter()
                answer = await client.get(page.format(tenant=tenant))
                took = (time.perf_counter() - began) * 1000
                assert answer.status_code == 200, (page, answer.status_code)
                if turn >= WARM:
                    times[page].append(took)
    services.database.close()
    return times


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=30, help="times that each page is asked for")
    options = parser.parse_args(argv)
    with own_database() as url, tempfile.TemporaryDirectory() as folder:
        database = Database(url)
        upgrade(database)
        began = time.perf_counter()
        tenant = fill(database, SystemClock(), options.events, progress)
        with database.transaction() as session:
            ensure_default_prices(session, SystemClock(), MODEL)
        progress("vacuum and checkpoint")
        with database.db_engine.connect() as connection:
            plain = connection.execution_options(isolation_level="AUTOCOMMIT")
            plain.exec_driver_sql("set statement_timeout = 0")
            plain.exec_driver_sql("vacuum (analyze)")
            plain.exec_driver_sql("checkpoint")
        database.close()
        progress(f"the data took {time.perf_counter() - began:.0f} s")
        times = asyncio.run(measure(url, tenant, Path(folder), options.turns))
    report(times, options.events)


def report(times: dict[str, list[float]], events: int) -> None:
    said = {"events": events, "tenants": TENANTS, "days": DAYS, "database": "postgresql"}
    found = {page: p95(values) for page, values in times.items()}
    for page, value in sorted(found.items(), key=lambda pair: -pair[1]):
        median = statistics.median(times[page])
        least = min(times[page])
        progress(f"{page:32} least {least:6.1f}, p50 {median:6.1f}, p95 {value:6.1f} ms")
    for page, value in found.items():
        detail = {**said, "page": page, "turns": len(times[page])}
        name = f"dashboard page {page}, p95"
        figure(name, value, "ms", False, "limit", LIMIT_MS, at_least=1.0, settings=detail)
    slowest = max(found, key=lambda page: found[page])
    figure(
        "dashboard, the slowest page, p95",
        found[slowest],
        "ms",
        False,
        "limit",
        LIMIT_MS,
        at_least=1.0,
        settings={**said, "page": slowest},
    )


def p95(values: list[float]) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(0.95 * len(ranked)))]


if __name__ == "__main__":
    main(sys.argv[1:])
