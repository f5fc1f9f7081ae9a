"""The migrated schema is the models' schema, on both databases, forward and back."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from core.database import Database
from migrations.run import current, downgrade, head, upgrade
from migrations.tables import metadata


def _is_no_partition(_item: object, name: str | None, kind: str, *_rest: object) -> bool:
    return kind != "table" or not str(name).startswith(
        ("usage_events_", "charges_", "engine_receipts_")
    )


def _differences(database: Database) -> list[object]:
    with database.db_engine.connect() as connection:
        options = {"compare_type": True, "include_object": _is_no_partition}
        migration = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(migration, metadata))


def test_an_upgraded_database_equals_the_models(database_url: str) -> None:
    database = Database(database_url)
    upgrade(database)
    assert current(database) == head()
    assert _differences(database) == []
    database.close()


def test_primary_keys_are_those_of_the_models(database: Database) -> None:
    """Which the comparison above does not look at. On PostgreSQL a partition's column is in them, too."""
    found = inspect(database.db_engine)
    keys = {
        name: set(found.get_pk_constraint(name)["constrained_columns"]) for name in metadata.tables
    }
    expected = {
        name: {column.name for column in table.primary_key}
        for name, table in metadata.tables.items()
    }
    assert keys == expected


def test_every_step_goes_back_and_forward_again(database_url: str) -> None:
    database = Database(database_url)
    upgrade(database)
    downgrade(database, "base")
    left = inspect(database.db_engine).get_table_names()
    assert left == ["alembic_version"]
    upgrade(database)
    assert _differences(database) == []
    database.close()


def test_a_second_upgrade_changes_nothing(database: Database) -> None:
    upgrade(database)
    assert current(database) == head()


def test_the_old_name_of_the_daily_roll_up_stays_readable(database: Database) -> None:
    row = "('2026-03-01', 'acme', 'demo', 'USD', 2, 10, 0, 5, 70)"
    with database.transaction() as session:
        session.execute(text(f"insert into usage_tenant_daily values {row}"))
    with database.read() as session:
        found = session.execute(text("select tenant_id, amount from usage_house_daily")).all()
    assert [tuple(each) for each in found] == [("acme", 70)]
    downgrade(database, "0003_moderation")
    with database.read() as session:
        assert session.execute(text("select amount from usage_house_daily")).scalar() == 70
    upgrade(database)
    with database.read() as session:
        assert session.execute(text("select amount from usage_tenant_daily")).scalar() == 70


def test_the_old_names_of_the_tables_stay_readable(database: Database) -> None:
    with database.transaction() as session:
        for insert in (
            "idempotency_records values ('a', 'acme', 'b', '2026-03-01', '2026-03-02', 200, '[]', 'ok',"
            " 2)",
            "limit_rejections values ('acme', '2026-03-01', 'money', 3, 2, 50)",
            "files (id, tenant_id, project_id, key_id, purpose, filename, bytes, created_at)"
            " values ('file_a', 'acme', 'p', 'k', 'batch', 'x', 1, '2026-03-01')",
            "file_chunks values ('file_a', 0, 'x')",
        ):
            session.execute(text(f"insert into {insert}"))
    old = (
        ("select cast(answer as text) from kept_answers", ("ok", "\\x6f6b")),
        ("select refused + waited + waited_ms from limit_refusals", (55,)),
        ("select number from file_pieces", (0,)),
    )
    for revision in (head(), "0011_receipts_by_engine"):
        downgrade(database, revision)
        for query, values in old:
            with database.read() as session:
                assert session.execute(text(query)).scalar() in values
    upgrade(database)
    with database.read() as session:
        assert session.execute(text("select rejected from limit_rejections")).scalar() == 3


OLD_ROWS = {
    "kept_answers": (
        "id, tenant_id, body_sha256, claimed_at, expires_at, status, headers, answer",
        "'k1', 'acme', 'b1', '2026-03-01 10:00', '2026-03-02 10:00', 200, '[]', 'ok'",
    ),
    "limit_refusals": (
        "tenant_id, at, reason, refused, waited, waited_ms",
        "'acme', '2026-03-01 10:00', 'money', 3, 2, 50",
    ),
    "files": (
        "id, tenant_id, project_id, key_id, purpose, filename, bytes, created_at",
        "'file_a', 'acme', 'p', 'k', 'batch', 'x', 1, '2026-03-01 10:00'",
    ),
    "file_pieces": ("file_id, number, content", "'file_a', 0, 'x'"),
}
RENAMED = {
    "kept_answers": ("idempotency_records", {"answer": "response"}),
    "limit_refusals": (
        "limit_rejections",
        {"refused": "rejected", "waited": "queued", "waited_ms": "queued_ms"},
    ),
    "file_pieces": ("file_chunks", {}),
}


def _row(database: Database, table: str) -> dict[str, object]:
    with database.read() as session:
        (row,) = session.execute(text(f"select * from {table}")).mappings()
        return dict(row)


def test_rows_that_were_written_under_the_old_names_survive_each_way(database: Database) -> None:
    downgrade(database, "0011_receipts_by_engine")
    with database.transaction() as session:
        for table, (columns, values) in OLD_ROWS.items():
            session.execute(text(f"insert into {table} ({columns}) values ({values})"))
    before = {table: _row(database, table) for table in RENAMED}
    upgrade(database)
    for table, (new, columns) in RENAMED.items():
        expected = {columns.get(name, name): value for name, value in before[table].items()}
        if new == "idempotency_records":
            expected["stored_bytes"] = 2  # of the response, filled by a later revision
        assert _row(database, new) == expected
        assert _row(database, table) == before[table], "the view has the old columns"
    names = {
        index["name"] for index in inspect(database.db_engine).get_indexes("idempotency_records")
    }
    assert names == {
        f"ix_idempotency_records_{each}" for each in ("tenant_id", "expires_at", "stored_bytes")
    }
    downgrade(database, "0011_receipts_by_engine")
    assert {table: _row(database, table) for table in RENAMED} == before
    upgrade(database)
    assert _differences(database) == []


def test_the_renamed_keys_still_hold(database: Database) -> None:
    downgrade(database, "0011_receipts_by_engine")
    with database.transaction() as session:
        for table, (columns, values) in OLD_ROWS.items():
            session.execute(text(f"insert into {table} ({columns}) values ({values})"))
    upgrade(database)
    again = "insert into limit_rejections values ('acme', '2026-03-01 10:00', 'money', 1, 1, 1)"
    with pytest.raises(DBAPIError), database.transaction() as session:
        session.execute(text(again))
    orphan = "insert into file_chunks values ('file_b', 0, 'x')"
    with pytest.raises(DBAPIError), database.transaction() as session:
        session.execute(text(orphan))
