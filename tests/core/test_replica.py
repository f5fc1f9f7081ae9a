"""Reports on a read replica: a second PostgreSQL database, so that a test sees which one answered."""

import time
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import InternalError, SQLAlchemyError

from billing.accounts.tables import Seller
from core.clock import SystemClock
from core.database import Database
from core.errors import SettingError
from core.replica import Replica
from core.settings import Settings
from gateway.cli.doctor import storage
from gateway.cli.doctor.check import Health
from tests.conftest import _postgres


@pytest.fixture
def pair(postgres_database: Database, migrated_postgres: str) -> Iterator[Database]:
    """A database and a copy that is marked, so that what it answers is known."""
    with _postgres(migrated_postgres) as read_url:
        made = Database(postgres_database.url, read_url=read_url)
        with psycopg.connect(read_url, autocommit=True) as copy:
            copy.execute("create table is_replica (yes int)")
            copy.execute("insert into is_replica values (1)")
        yield made
        made.close()


def is_replica(session: object) -> bool:
    found = session.scalar(text("select to_regclass('is_replica') is not null"))  # type: ignore[attr-defined]
    return bool(found)


def test_reports_are_read_from_the_replica_and_everything_else_from_the_database(
    pair: Database,
) -> None:
    with pair.report() as session:
        assert is_replica(session)
    with pair.report(fresh=True) as session:
        assert is_replica(session)  # a copy that is no standby cannot tell how late it is
    for other in (pair.read, pair.snapshot, pair.transaction):
        with other() as session:
            assert not is_replica(session)


def test_a_report_cannot_write(pair: Database) -> None:
    with (
        pytest.raises(InternalError, match="read-only transaction"),
        pair.report() as session,
    ):
        session.execute(text("insert into is_replica values (2)"))
    with (
        pytest.raises(InternalError, match="read-only transaction"),
        pair.report() as session,
    ):
        session.execute(text("create table more (x int)"))


def test_a_role_that_may_only_read_is_enough(
    postgres_database: Database, migrated_postgres: str
) -> None:
    role = f"reader_{time.monotonic_ns()}"
    with (
        _postgres(migrated_postgres) as read_url,
        psycopg.connect(read_url, autocommit=True) as admin,
    ):
        admin.execute(f"create role {role} login")
        admin.execute(f"grant pg_read_all_data to {role}")
        try:
            url = read_url.replace("//root@", f"//{role}@")
            made = Database(postgres_database.url, read_url=url)
            with made.report() as session:
                assert session.scalar(text("select current_user")) == role
                assert session.query(Seller).count() >= 0
            made.close()
        finally:
            admin.execute(f"revoke pg_read_all_data from {role}")
            admin.execute(f"drop role {role}")


def test_without_an_answer_the_database_is_read(postgres_database: Database) -> None:
    away = postgres_database.url.rpartition("/")[0] + "/there_is_none"
    made = Database(postgres_database.url, read_url=away)
    for _ in range(2):
        with made.report() as session:
            assert session.scalar(text("select current_database()")) != "there_is_none"
    finding = storage.replica(
        Settings(database_url=postgres_database.url, read_database_url=away), SystemClock()
    )
    assert finding.health is Health.BAD
    made.close()


def test_a_replica_that_is_late_is_not_read_where_it_matters(
    pair: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "_has_caught_up", lambda *_: False)
    with pair.report(fresh=True) as session:
        assert not is_replica(session)
    with pair.report() as session:
        assert is_replica(session)


def test_doctor_shows_the_replica(pair: Database, postgres_database: Database) -> None:
    assert storage.replica(Settings(), SystemClock()).health is Health.UNUSED
    replica = pair._replica
    assert replica is not None
    read_url = replica._engine.url.render_as_string(hide_password=False)
    settings = Settings(database_url=postgres_database.url, read_database_url=read_url)
    finding = storage.replica(settings, SystemClock())
    assert finding.health is Health.WARN and "not a standby" in finding.says


def test_sqlite_has_no_replica(sqlite_database: Database, postgres_url: str) -> None:
    with pytest.raises(SettingError, match="TOLLHOUSE_READ_DATABASE_URL"):
        Database(sqlite_database.url, read_url=postgres_url)
    with pytest.raises(SettingError, match="TOLLHOUSE_READ_DATABASE_URL"):
        Database(postgres_url, read_url="sqlite:///x")


def test_without_a_replica_a_report_reads_the_database(sqlite_database: Database) -> None:
    with sqlite_database.report() as session:
        assert session.scalar(text("select 1")) == 1


def test_a_failing_report_raises_its_own_error(pair: Database) -> None:
    with pytest.raises(SQLAlchemyError, match="no_such_table"), pair.report() as session:
        session.execute(text("select * from no_such_table"))
