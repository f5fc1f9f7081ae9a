"""Write the dumps that `test_releases.py` upgrades: `python -m tests.migrations.write_release 0.1.0`.

A dump is written once, by the release whose name it has, and never again. Both hold the same life: two
tenants, two months of usage, late usage, a credit, final invoices, closed days and an audit. Needs
PostgreSQL (TOLLHOUSE_TEST_POSTGRES) and its `pg_dump`.
"""

import gzip
import re
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

import psycopg

from billing.audit import reconcile
from core.clock import FakeClock
from core.database import Database
from migrations.run import upgrade
from tests.billing.conftest import deployment_of
from tests.billing.exports.test_exports import make_busy
from tests.conftest import POSTGRES

FOLDER = Path(__file__).parent / "releases"


def live(database: Database) -> None:
    """Fill a migrated database."""
    clock = FakeClock()
    make_busy(deployment_of(database, clock))
    clock.advance(days=3)
    assert reconcile.close_days(database, clock)
    with database.transaction() as session:
        assert reconcile.audit(session).clean


def sqlite_dump(folder: Path) -> bytes:
    path = folder / "life.db"
    database = Database(f"sqlite:///{path}")
    upgrade(database)
    live(database)
    with database.db_engine.connect() as connection:
        connection.exec_driver_sql("pragma wal_checkpoint(truncate)")
    database.close()
    small = folder / "small.db"
    with closing(sqlite3.connect(path)) as made:
        made.execute("vacuum into ?", (str(small),))
    return small.read_bytes()


def postgresql_dump() -> bytes:
    name = f"tollhouse_release_{uuid.uuid4().hex[:10]}"
    url = f"{POSTGRES.rpartition('/')[0]}/{name}"
    with psycopg.connect(POSTGRES, autocommit=True) as admin:
        admin.execute(f"create database {name}")
    try:
        database = Database(url)
        upgrade(database)
        live(database)
        database.close()
        command = ["pg_dump", "--no-owner", "--no-acl", "--rows-per-insert=100", url]
        written = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    finally:
        with psycopg.connect(POSTGRES, autocommit=True) as admin:
            admin.execute(f"drop database {name} with (force)")
    return re.sub(r"(?m)^(\\.*|SET transaction_timeout.*)\n", "", written).encode()


def main() -> None:
    release = sys.argv[1]
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"db": sqlite_dump(Path(folder)), "sql": postgresql_dump()}
    for kind, content in dumps.items():
        path = FOLDER / f"{release}.{kind}.gz"
        if path.exists():
            raise SystemExit(f"{path} is there: a release's dump is not written again")
        path.write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main()
