"""What a command works with: the settings, the clock and the database, opened and closed around it."""

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
    """DependencyDown, with the next step, where the database does not answer."""
    settings = load_settings()
    database = Database(settings.effective_database_url)
    try:
        database.ping()
        yield Toolbox(settings, SystemClock(), database)
    finally:
        database.close()
