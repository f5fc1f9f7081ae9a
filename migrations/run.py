"""Upgrade, downgrade and inspect the schema. Runs Alembic from code, so no ini file is needed.

Alembic is imported where it is used: commands that do not migrate need not wait for it.
"""

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, event, text
from sqlalchemy.exc import OperationalError

from core.database import Database
from core.errors import BadRequest, DependencyDown

if TYPE_CHECKING:
    from alembic.config import Config

# Key of the PostgreSQL advisory lock that lets only one starting process migrate; any constant.
_LOCK = 7_011_991
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's code where `lock_timeout` ended a statement
_TRIES = 100
_PAUSE_S = 0.5  # for those that waited behind the migration

log = logging.getLogger("tollhouse.migrations")


def upgrade(database: Database, revision: str = "head", lock_timeout_s: float = 2.0) -> None:
    """`revision` is `head` or an id. BadRequest for an unknown one.

    On PostgreSQL each revision is a transaction of its own, which waits `lock_timeout_s` for a table that
    others use, lets them pass, and tries again: nobody waits longer behind a migration that waits.
    Raises DependencyDown after `_TRIES`; the revisions before that one stay applied. A schema of a newer
    version stays as it is: Conflict if this version cannot use it.
    """
    from alembic import command

    if revision == "head" and (newer := _newer_revision(database)) is not None:
        from migrations.newer import require_additive

        with database.db_engine.connect() as connection:
            require_additive(connection, newer)
        return
    _run(database, revision, command.upgrade, lock_timeout_s)


def downgrade(database: Database, revision: str, lock_timeout_s: float = 2.0) -> None:
    """`revision` is `base` or an id. BadRequest for an unknown one. Transactions as in `upgrade`."""
    from alembic import command

    _run(database, revision, command.downgrade, lock_timeout_s)


def _run(
    database: Database,
    revision: str,
    command: Callable[["Config", str], None],
    lock_timeout_s: float,
) -> None:
    if database.dialect != "postgresql":  # one writer, and no lock but the transaction's
        with _known_revision(revision), database.db_engine.begin() as connection:
            command(_config(connection), revision)
        return
    with _known_revision(revision), _alone(database), database.db_engine.connect() as connection:
        event.listen(connection, "begin", partial(_bound_waits, round(lock_timeout_s * 1000)))
        _try_often(partial(command, _config(connection), revision), connection)


def _bound_waits(lock_timeout_ms: int, connection: Connection) -> None:
    """In each transaction: behind PgBouncer a session is nobody's own."""
    from core.postgres_connection import allow_long_statements  # psycopg is for PostgreSQL alone

    connection.exec_driver_sql(f"set local lock_timeout = {lock_timeout_ms}")
    connection.exec_driver_sql("set local statement_timeout = 0")
    allow_long_statements(connection)


def _try_often(migrate: Callable[[], None], connection: Connection) -> None:
    for left in reversed(range(_TRIES)):
        try:
            return migrate()
        except OperationalError as error:
            connection.rollback()
            if getattr(error.orig, "sqlstate", "") != _LOCK_NOT_AVAILABLE:
                raise
            if not left:
                raise _locked(error) from None
            log.warning("a table is in use; the migration is tried again: %s", error.orig)
            time.sleep(_PAUSE_S)


def _locked(error: OperationalError) -> DependencyDown:
    return DependencyDown(
        f"The schema cannot be changed: a table stayed in use through {_TRIES} attempts ({error.orig}).",
        next_step="End the transaction that pg_stat_activity shows as the oldest, and run `tollhouse "
        "migrate` again; the revisions that were done stay done.",
    )


@contextmanager
def _alone(database: Database) -> Iterator[None]:
    """One process migrates at a time. Each revision ends a transaction, so the lock is that of another
    one, which holds nothing else and ends with its connection whatever happens."""
    from core.postgres_connection import allow_long_statements  # psycopg is for PostgreSQL alone

    with database.db_engine.begin() as connection:
        # Another process's migration may take long, and so may this one's.
        allow_long_statements(connection)
        for name in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"):
            connection.exec_driver_sql(f"set local {name} = 0")
        connection.execute(text(f"select pg_advisory_xact_lock({_LOCK})"))
        yield


def current(database: Database) -> str | None:
    """The database's revision; None for an empty database."""
    from alembic.runtime.migration import MigrationContext

    with database.db_engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head() -> str | None:
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(Path(__file__).parent)).get_current_head()


def _newer_revision(database: Database) -> str | None:
    """The database's revision, if this version does not have it."""
    from alembic.script import ScriptDirectory

    found = current(database)
    if found is None:
        return None
    with database.db_engine.connect() as connection:
        script = ScriptDirectory.from_config(_config(connection))
    return None if any(each.revision == found for each in script.walk_revisions()) else found


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
