"""Databases that tests use one after another are as new; of one kind they share compiled statements."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select
from sqlalchemy.sql.compiler import SQLCompiler

from core.clock import FakeClock
from core.database import Database
from core.tenants.models import Tenant
from tests.billing.conftest import deployment_of
from tests.conftest import POSTGRES, need_postgres
from tests.postgres_copies import Copies


@pytest.fixture
def copies(migrated_postgres: str) -> Iterator[Copies]:
    made = Copies(POSTGRES, migrated_postgres)
    yield made
    made.close()


def used(copies: Copies) -> str:
    """One in which a tenant, an account and prices were written, some of them append-only."""
    name = copies.take()
    database = Database(copies.url(name))
    deployment_of(database, FakeClock())
    database.close()
    return name


def rows(url: str) -> dict[str, int]:
    with psycopg.connect(url) as session:
        tables = session.execute("select tablename from pg_tables where schemaname = 'public'")
        return {
            name: session.execute(f'select count(*) from "{name}"').fetchall()[0][0]  # type: ignore[arg-type]
            for (name,) in tables.fetchall()
        }


def test_what_a_test_leaves_is_emptied(copies: Copies) -> None:
    new = copies.take()
    expected = rows(copies.url(new))
    first = used(copies)
    assert rows(copies.url(first)) != expected
    copies.give_back(first)
    second = copies.take()
    assert second != first, "what is kept by a name is not kept for the next"
    assert rows(copies.url(second)) == expected
    with (
        psycopg.connect(copies.url(second)) as session,
        pytest.raises(psycopg.Error, match="append-only"),
    ):
        session.execute("truncate ledger_entries cascade")  # its guards are as they were
    copies.give_back(second)
    copies.give_back(new)
    assert len(copies._free) == 2


@pytest.mark.parametrize(
    "change",
    [
        "create table more (id integer)",
        "alter table tenants add column more text",
        "alter table tenants alter column display_name drop not null",
        "alter table ledger_entries disable trigger user",
        "delete from rating_shards",
        "create index more on tenants (display_name)",
        "create or replace function more() returns integer language sql as 'select 1'",
    ],
)
def test_one_of_which_more_than_rows_changed_is_dropped(copies: Copies, change: str) -> None:
    name = used(copies)
    with psycopg.connect(copies.url(name)) as session:
        session.execute(change)  # type: ignore[arg-type]
    copies.give_back(name)
    assert copies._free == []
    with psycopg.connect(POSTGRES) as admin:
        found = admin.execute("select 1 from pg_database where datname = %s", (name,)).fetchall()
    assert found == []


def test_a_statement_is_compiled_once_for_each_kind_of_database(
    tmp_path: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_postgres()
    compiled = []
    make = SQLCompiler.__init__

    def counted(compiler: SQLCompiler, dialect: object, *given: object, **named: object) -> None:
        compiled.append(getattr(dialect, "name", ""))
        make(compiler, dialect, *given, **named)  # type: ignore[arg-type]

    names = [used(copies) for _ in range(2)]
    statement = (
        select(Tenant.name).where(Tenant.name == "acme").order_by(Tenant.display_name.desc())
    )
    monkeypatch.setattr(SQLCompiler, "__init__", counted)
    found = []
    for url in [copies.url(name) for name in names]:
        database = Database(url)
        with database.read() as session:
            found.append(session.scalars(statement).all())
        database.close()
    assert found == [["acme"]] * 2
    assert compiled.count("postgresql") <= 1
    for name in names:
        copies.give_back(name)
