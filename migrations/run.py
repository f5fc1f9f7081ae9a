"""Upgrade, downgrade and inspect the schema. Runs Alembic from code, so no ini file is needed.

Alembic is imported where it is used: commands that do not migrate need not wait for it.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from core.database import Database
from core.errors import BadRequest

if TYPE_CHECKING:
    from alembic.config import Config

# Key of the PostgreSQL advisory lock that lets only one starting process migrate; any constant.
_LOCK = 7_011_991


def upgrade(database: Database, revision: str = "head") -> None:
    """`revision` is `head` or an id. BadRequest for an unknown one."""
    from alembic import command

    with _known_revision(revision), database.db_engine.begin() as connection:
        _lock(connection)
        command.upgrade(_config(connection), revision)


def downgrade(database: Database, revision: str) -> None:
    """`revision` is `base` or an id. BadRequest for an unknown one."""
    from alembic import command

    with _known_revision(revision), database.db_engine.begin() as connection:
        _lock(connection)
        command.downgrade(_config(connection), revision)


def current(database: Database) -> str | None:
    """The database's revision; None for an empty database."""
    from alembic.runtime.migration import MigrationContext

    with database.db_engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head() -> str | None:
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(Path(__file__).parent)).get_current_head()


@contextmanager
def _known_revision(revision: str) -> Iterator[None]:
    from alembic.util import CommandError

    try:
        yield
    except CommandError as error:
        raise BadRequest(
            f"The schema cannot be changed to {revision!r}: {error}.",
            next_step="Give the id of a file in migrations/versions, such as 0001_core, or head or base.",
        ) from None


def _config(connection: Connection) -> "Config":
    from alembic.config import Config

    config = Config(output_buffer=io.StringIO(), stdout=io.StringIO())
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"select pg_advisory_xact_lock({_LOCK})"))
