"""The settings, clock and database that a CLI command uses, closed when it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError

from billing.archive.opening import open_database
from core.clock import Clock, SystemClock
from core.data_dir import private_files
from core.database import Database
from core.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class CommandContext:
    settings: Settings
    clock: Clock
    database: Database


@contextmanager
def command_context() -> Iterator[CommandContext]:
    """Raises DependencyDown when the database does not answer, SettingError when it has no schema."""
    settings = load_settings()
    with private_files():
        database = open_database(settings)
        try:
            database.ping()
            yield CommandContext(settings, SystemClock(), database)
        except DBAPIError as error:
            explained = database.explained(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            database.close()
