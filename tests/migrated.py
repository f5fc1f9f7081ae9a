"""A migrated SQLite file that tests copy, so that each of them does not migrate anew."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from core.database import Database
from migrations.run import upgrade


@cache
def migrated_file() -> Path:
    """Made once per process and removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="tollhouse-migrated-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    made = Database(f"sqlite:///{directory / 'tollhouse.db'}")
    upgrade(made)
    made.close()
    return directory / "tollhouse.db"


def migrated(url: str) -> Database:
    """A SQLite database that is not there yet is a copy of the migrated file."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(migrated_file(), path)
        return Database(url)
    database = Database(url)
    upgrade(database)
    return database
