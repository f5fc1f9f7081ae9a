"""The migrated schema is the models' schema, on both databases, forward and back."""

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from core.database import Database
from migrations.run import current, downgrade, head, upgrade
from migrations.tables import metadata


def _is_no_partition(_item: object, name: str | None, kind: str, *_rest: object) -> bool:
    return kind != "table" or not str(name).startswith(
        ("usage_events_", "charges_", "engine_receipts_")
    )


def differences(database: Database) -> list[object]:
    with database.db_engine.connect() as connection:
        options = {"compare_type": True, "include_object": _is_no_partition}
        migration = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(migration, metadata))


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


def test_an_upgraded_database_equals_the_models_and_every_step_goes_back_and_forward_again(
    database_url: str,
) -> None:
    database = Database(database_url)
    upgrade(database)
    assert current(database) == head()
    assert differences(database) == []
    downgrade(database, "base")
    left = inspect(database.db_engine).get_table_names()
    assert left == ["alembic_version"]
    upgrade(database)
    assert differences(database) == []
    database.close()


def test_a_second_upgrade_changes_nothing(database: Database) -> None:
    upgrade(database)
    assert current(database) == head()
