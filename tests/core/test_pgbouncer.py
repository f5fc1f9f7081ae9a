"""Everything that PostgreSQL serves also through PgBouncer in transaction mode.

Two server connections for many clients, so that a transaction rarely finds the connection of the one
before; the database's own time zone is not UTC.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from core.clock import FakeClock
from core.database import Database
from core.errors import SettingError
from core.events import EngineCount, UsageEvent
from gateway.metering.shipper import ship_file
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_receipt, move_to_outbox
from gateway.metering.usage_sink import SqlUsageSink
from migrations.run import downgrade, upgrade
from tests.billing.conftest import Deployment, deployment_of
from tests.conftest import POSTGRES
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import MODEL, running_deployment
from tests.pooler import pgbouncer


@pytest.fixture(scope="module")
def bouncer() -> Iterator[int]:
    """The port of a PgBouncer of this module's own, in front of the tests' PostgreSQL."""
    server = make_url(POSTGRES)
    with pgbouncer(
        (server.host or "127.0.0.1", server.port or 5432), server.username or ""
    ) as port:
        yield port


def pooled(url: str, port: int, query: str = "?pooler=transaction") -> str:
    name = make_url(url).database
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"alter database {name} set timezone to 'Asia/Kathmandu'")
    return f"postgresql://root@127.0.0.1:{port}/{name}{query}"


def ship(made: Deployment, folder: Path, events: list[UsageEvent]) -> None:
    """Through a spool file, as a gateway does."""
    file = SpoolFile(folder / f"{events[0].request_id}.db")
    for each in events:
        counts = (each.input_tokens, each.cached_tokens, each.output_tokens + each.waived_tokens)
        noted = EngineCount(each.request_id, each.engine_id, *counts, each.finished_at)
        file.commit([insert_receipt(noted), *move_to_outbox(each)])
    ship_file(file.connection, SqlUsageSink(made.database, made.clock), file.commit)
    file.close(remove=True)


def test_shipping_rating_and_closing_through_a_pooler(
    bouncer: int, postgres_database: Database, tmp_path: Path
) -> None:
    database = Database(pooled(postgres_database.url, bouncer), pool_size=8)
    made = deployment_of(database, FakeClock())
    many = [[made.event() for _ in range(60)] for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda events: ship(made, tmp_path, events), many))
        list(pool.map(lambda _: rate_all(database, made.clock), range(4)))
        list(pool.map(lambda _: service_rollups.sum_all(database, made.clock), range(4)))
    with database.snapshot() as session:
        report = reconcile.audit(session)
        hours = session.execute(text("select distinct at from service_hourly")).scalars().all()
    assert report.clean, report.differences
    assert report.steps["events"]["count"] == report.steps["charges"]["count"] == 480
    assert [each.isoformat() for each in hours] == ["2026-01-01T00:00:00+00:00"], "hours of UTC"
    made.clock.advance(days=40)
    assert invoice_run.run(database, made.clock).finalised
    assert reconcile.close_days(database, made.clock)
    with database.snapshot() as session:
        assert reconcile.audit(session).clean
    database.close()


def test_migrations_go_both_ways_through_a_pooler(bouncer: int, postgres_url: str) -> None:
    database = Database(pooled(postgres_url, bouncer))
    upgrade(database)
    downgrade(database, "0001_core")
    upgrade(database)
    database.close()


def test_a_request_and_a_page_through_a_pooler(
    bouncer: int, postgres_url: str, tmp_path: Path
) -> None:
    url = pooled(postgres_url, bouncer)
    with running_deployment(tmp_path, settings={"database_url": url}) as served:
        headers = {"authorization": f"Bearer {served.key}"}
        body = {"model": MODEL, "prompt": "one two", "max_tokens": 4}
        for _ in range(8):  # the fifth use of a statement would be prepared
            address = f"{served.url}/v1/completions"
            assert httpx.post(address, json=body, headers=headers, timeout=60).status_code == 200
        served.events(8)
        rate_all(served.services.database, served.services.clock)
        with closing(browser(served, served.key)) as client:
            for _ in range(6):
                page = client.get("/dashboard/usage")
                assert page.status_code == 200 and MODEL in page.text


def test_without_the_setting_a_pooler_is_refused_and_a_wrong_one_named(
    bouncer: int, postgres_url: str
) -> None:
    database = Database(pooled(postgres_url, bouncer, ""))
    with (
        pytest.raises(DBAPIError, match="unsupported startup parameter"),
        database.read() as session,
    ):
        session.execute(text("select 1"))
    database.close()
    with pytest.raises(SettingError, match="pooler=transaction"):
        Database("postgresql://h/d?pooler=session")
