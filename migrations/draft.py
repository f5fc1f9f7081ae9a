"""`python -m migrations.draft billing` prints the upgrade operations that create a package's tables as
its models define them. Review the output and copy it into a file of `versions/`.
"""

import sys
from typing import Any, Literal

from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from core.database import BigKey, Units, UtcDateTime
from migrations.tables import metadata

_NAMED = {UtcDateTime: "UtcDateTime", Units: "Units"}


def _render(kind: str, item: Any, _context: object) -> str | Literal[False]:
    if kind != "type":
        return False
    if item is BigKey:
        return "BigKey"
    if type(item).__name__ == "JSON":
        return "Json"
    return _NAMED.get(type(item), False)


def draft(package: str) -> str:
    """The `op` calls that create the tables of the package's models."""
    wanted = _tables_of(package)
    with create_engine("sqlite://").connect() as connection:
        options = {
            "target_metadata": wanted,
            "render_item": _render,
            "compare_type": True,
            "user_module_prefix": "",
        }
        migration = MigrationContext.configure(connection, opts=options)
        steps = produce_migrations(migration, wanted)
        assert steps.upgrade_ops is not None
        return render_python_code(
            steps.upgrade_ops, render_item=_render, migration_context=migration
        )


def _tables_of(package: str) -> MetaData:
    from core.database import Base

    chosen = MetaData(naming_convention=metadata.naming_convention)
    for mapper in Base.registry.mappers:
        if mapper.class_.__module__.startswith(package):
            mapper.local_table.to_metadata(chosen)  # type: ignore[attr-defined]
    for table in list(chosen.tables.values()):
        for constraint in table.foreign_keys:
            name = constraint.target_fullname.split(".")[0]
            if name not in chosen.tables:
                raise SystemExit(
                    f"{table.name} has a foreign key to {name}, a table of another package; "
                    "store its id without a foreign key"
                )
    return chosen


if __name__ == "__main__":
    sys.stdout.write(draft(sys.argv[1]) + "\n")
