"""The migrated schema is the models' schema, on both databases, forward and back."""

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from core.database import Database
from migrations.run import current, downgrade, head, upgrade
from migrations.tables import metadata


def _is_no_partition(_item: object, name: str | None, kind: str, *_rest: object) -> bool:
    return kind != "table" or not str(name).startswith("usage_events_")


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
            "idempotency_records values ('a', 'acme', 'b', '2026-03-01', '2026-03-02', 200, '[]', 'ok')",
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
