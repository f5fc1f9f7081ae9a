"""The store of moved days on ClickHouse's own engine, in this process, beside PostgreSQL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from billing.archive.clickhouse import ClickHouseArchive
from billing.usage.raw_rows import RawArchive
from core.clock import FakeClock
from core.database import Database
from core.ids import use_sources
from tests.billing.conftest import Deployment, deployment_of
from tests.contracts.chdb_client import chdb_client

START = datetime(2026, 1, 20, tzinfo=UTC)


@contextmanager
def archive_in(folder: Path) -> Iterator[ClickHouseArchive]:
    pytest.importorskip("chdb")
    with chdb_client(folder / "clickhouse") as client:
        yield ClickHouseArchive(client)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[ClickHouseArchive]:
    with archive_in(tmp_path) as made:
        yield made


@pytest.fixture
def with_archive(postgres_database: Database, archive: RawArchive) -> Iterator[Deployment]:
    with deployment_with(postgres_database.url, archive) as made:
        yield made


@contextmanager
def deployment_with(database_url: str, archive: RawArchive) -> Iterator[Deployment]:
    clock = FakeClock(START)
    database = Database(database_url, session_info={RawArchive: archive})
    with use_sources(lambda: int(clock.now().timestamp() * 1000), os.urandom):
        yield deployment_of(database, clock)
    database.close()
