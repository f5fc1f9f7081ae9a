"""A schema that a newer version has upgraded: whether this version can serve on with it."""

import logging

from sqlalchemy import Connection, inspect

from core.errors import Conflict
from migrations.tables import metadata

log = logging.getLogger("tollhouse.migrations")


def require_additive(connection: Connection, revision: str) -> None:
    """Log that the schema is newer. Raises Conflict if it lacks a table or column of this version, or
    demands a column that this version does not write."""
    problems = _problems(connection)
    if problems:
        raise Conflict(
            f"The schema {revision} is of a newer version, which this one cannot use: "
            f"{'; '.join(problems[:5])}.",
            next_step="Start the version that upgraded the schema, or restore the backup from before.",
        )
    log.warning(
        "the schema %s is of a newer version and only adds to this one's: serving on; start the newer "
        "version everywhere soon",
        revision,
    )


def _problems(connection: Connection) -> list[str]:
    there, found = inspect(connection), []
    names = set(there.get_table_names()) | set(there.get_view_names())
    for table in metadata.sorted_tables:
        if table.name not in names:
            found.append(f"the table {table.name} is missing")
            continue
        columns = {each["name"]: each for each in there.get_columns(table.name)}
        missing = [each.name for each in table.columns if each.name not in columns]
        found += [f"{table.name}.{name} is missing" for name in missing]
        for name, each in columns.items():
            generated = each["default"] is not None or each.get("computed") or each.get("identity")
            if name not in table.columns and not each["nullable"] and not generated:
                found.append(f"{table.name}.{name} needs a value")
    return found
