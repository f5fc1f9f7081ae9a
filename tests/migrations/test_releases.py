"""A database of each release, with data, upgrades to the schema of now and keeps its rows and sums."""

import gzip
import re
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import func, select, text

from billing.audit import reconcile
from core.database import Database
from migrations.run import current, head, upgrade
from tests.migrations.test_schema import differences

FOLDER = Path(__file__).parent / "releases"
RELEASES = sorted(path.name.removesuffix(".db.gz") for path in FOLDER.glob("*.db.gz"))
# Of a life of two tenants and two months: rows that no later release may lose.
ROWS = {"usage_events": 121, "charges": 121, "invoices": 5, "rating_shards": 16}


def restored(release: str, url: str) -> Database:
    """The release's dump in the empty database at the URL."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        path.write_bytes(gzip.decompress((FOLDER / f"{release}.db.gz").read_bytes()))
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(gzip.decompress((FOLDER / f"{release}.sql.gz").read_bytes()))
    return Database(url)


def counts(database: Database) -> dict[str, int]:
    with database.read() as session:
        return {
            name: session.scalar(select(func.count()).select_from(text(name))) or 0 for name in ROWS
        }


@pytest.mark.parametrize("release", RELEASES)
def test_a_database_of_a_release_upgrades_with_its_rows(release: str, database_url: str) -> None:
    database = restored(release, database_url)
    assert counts(database) == ROWS
    upgrade(database)
    assert current(database) == head()
    assert differences(database) == []
    assert counts(database) == ROWS
    with database.snapshot() as session:
        report = reconcile.audit(session)
    assert report.clean, report
    database.close()


def test_each_release_has_a_dump_for_both_databases() -> None:
    assert RELEASES
    assert sorted(path.name.removesuffix(".sql.gz") for path in FOLDER.glob("*.sql.gz")) == RELEASES


def test_revisions_import_no_code_of_the_product() -> None:
    found = re.compile(
        r"^(?:from|import) (core|billing|moderation|gateway|engine|dashboards)", re.M
    )
    for path in (Path(__file__).parents[2] / "migrations" / "versions").glob("*.py"):
        assert not found.search(path.read_text()), path.name
