"""A schema is upgraded beside traffic: a transaction for each revision, which lets others pass."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from sqlalchemy import text

from core.database import Database
from core.errors import Conflict, DependencyDown
from migrations import run

_MAKE = "op.execute('create table busy (id int)')"
_ALTER = "op.execute('alter table busy add column more int')"
_FAIL = "op.execute('select 1 / 0')"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has these statements as the revisions that `migrations.run` runs."""
    made = tmp_path / "migrations"
    (made / "versions").mkdir(parents=True)
    copy(Path(run.__file__).with_name("env.py"), made / "env.py")
    plain = run._config

    def _config(connection: Any) -> Any:
        config = plain(connection)
        config.set_main_option("script_location", str(made))
        return config

    def _write(*statements: str) -> None:
        for number, statement in enumerate(statements, 1):
            before = f"'{number - 1}'" if number > 1 else None
            (made / "versions" / f"{number}.py").write_text(
                "from alembic import op\n"
                f"revision, down_revision = '{number}', {before}\n"
                f"def upgrade():\n    {statement}\ndef downgrade():\n    pass\n"
            )

    monkeypatch.setattr(run, "_config", _config)
    return _write


def test_a_revision_that_fails_leaves_those_before_it(
    postgres_database: Database, folder: Callable[..., None]
) -> None:
    database = _empty(postgres_database)
    folder(_MAKE, _FAIL)
    with pytest.raises(Exception, match="division by zero"):
        run.upgrade(database)
    assert run.current(database) == "1"
    folder(_MAKE, _ALTER)
    run.upgrade(database)
    assert run.current(database) == "2"


def test_who_reads_a_table_does_not_wait_for_the_one_that_the_migration_waits_for(
    postgres_database: Database, folder: Callable[..., None]
) -> None:
    """A reader of long standing holds the table. Another one comes while the migration waits: without
    a bound it would wait behind the migration until the first has ended."""
    database = _empty(postgres_database)
    folder(_MAKE)
    run.upgrade(database)
    folder(_MAKE, _ALTER)
    with ThreadPoolExecutor(2) as pool, database.db_engine.connect() as old:
        old.execute(text("select count(*) from busy"))
        migrating = pool.submit(run.upgrade, database, lock_timeout_s=0.2)
        for _ in range(20):
            assert pool.submit(_count, database).result(60) == 0
        assert not migrating.done()
        old.rollback()
        migrating.result(60)
    assert run.current(database) == "2"


def test_a_table_that_stays_in_use_is_an_error_that_says_what_to_do(
    postgres_database: Database, folder: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = _empty(postgres_database)
    folder(_MAKE)
    run.upgrade(database)
    folder(_MAKE, _ALTER)
    monkeypatch.setattr(run, "_TRIES", 2)
    monkeypatch.setattr(run, "_PAUSE_S", 0.01)
    with database.db_engine.connect() as old:
        old.execute(text("select count(*) from busy"))
        with pytest.raises(DependencyDown, match="2 attempts") as caught:
            run.upgrade(database, lock_timeout_s=0.05)
    assert "pg_stat_activity" in (caught.value.next_step or "")
    assert run.current(database) == "1"
    with database.db_engine.connect() as connection:
        assert connection.scalar(text("show lock_timeout")) == "30s"  # as everybody's


def test_processes_that_start_at_once_run_each_revision_once(
    postgres_database: Database, folder: Callable[..., None]
) -> None:
    database = _empty(postgres_database)
    folder(_MAKE, _ALTER)
    together = threading.Barrier(4)

    def _start() -> None:
        together.wait(60)
        run.upgrade(database)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(_start) for _ in range(4)]:
            each.result(60)
    assert run.current(database) == "2"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("create table later (id int not null)", ""),
        ("alter table invoices add column later int", ""),
        ("alter table invoices add column later int not null default 0", ""),
        ("alter table invoices drop column settled_at", "invoices.settled_at is missing"),
        ("alter table invoices rename to bills", "the table invoices is missing"),
        ("alter table bank_lines add column later int not null", "bank_lines.later needs a value"),
    ],
)
def test_an_older_version_serves_on_with_a_newer_schema_that_only_adds(
    postgres_database: Database, change: str, said: str
) -> None:
    with postgres_database.transaction() as session:
        session.execute(text(change))
        session.execute(text("update alembic_version set version_num = '9999_later'"))
    if not said:
        run.upgrade(postgres_database)
    else:
        with pytest.raises(Conflict, match=said) as caught:
            run.upgrade(postgres_database)
        assert "9999_later" in caught.value.message
        assert "Start the version that upgraded" in (caught.value.next_step or "")
    assert run.current(postgres_database) == "9999_later"


def _empty(database: Database) -> Database:
    with database.transaction() as session:
        session.execute(text("drop schema public cascade"))
        session.execute(text("create schema public"))
    return database


def _count(database: Database) -> int:
    with database.db_engine.connect() as connection:
        return int(connection.scalar(text("select count(*) from busy")) or 0)
