"""The settings, clock and database that a CLI command uses, closed when it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from core.clock import Clock, SystemClock
from core.database import Database
from core.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class Toolbox:
    settings: Settings
    clock: Clock
    database: Database


@contextmanager
def toolbox() -> Iterator[Toolbox]:
    """Raises DependencyDown when the database does not answer."""
    settings = load_settings()
    database = Database(settings.effective_database_url)
    try:
        database.ping()
        yield Toolbox(settings, SystemClock(), database)
    finally:
        database.close()
