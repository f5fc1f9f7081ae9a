"""What every database behind the port does alike."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Table, event, inspect, select, text

from core.database import Database, Limits, insert_new
from core.errors import DependencyDown, SettingError
from core.tenants.models import Tenant

NOW = datetime(2026, 2, 28, 23, 59, 59, 123456, tzinfo=UTC)


def _tenant(name: str) -> dict[str, Any]:
    return {
        "id": f"org_{name}",
        "name": name,
        "display_name": name,
        "plan": "free",
        "status": "active",
        "currency": "USD",
        "timezone": "UTC",
        "settings": {},
        "created_at": NOW,
    }


def _table() -> Table:
    table = inspect(Tenant).local_table
    assert isinstance(table, Table)
    return table


def test_a_replay_inserts_nothing(database: Database) -> None:
    rows = [_tenant("a"), _tenant("b")]
    with database.transaction() as session:
        assert insert_new(session, _table(), rows, "id") == 2
        assert insert_new(session, _table(), [*rows, _tenant("c")], "id") == 1
        assert insert_new(session, _table(), [], "id") == 0
    with database.read() as session:
        assert len(session.scalars(select(Tenant)).all()) == 3


def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.transaction() as session:
        session.add(Tenant(**_tenant("a")))
        session.flush()
        raise ZeroDivisionError
    with database.read() as session:
        assert session.scalars(select(Tenant)).all() == []


def test_a_moment_keeps_its_microsecond_and_its_zone(database: Database) -> None:
    eastward = NOW.astimezone(timezone(timedelta(hours=5)))
    with database.transaction() as session:
        session.add(Tenant(**{**_tenant("a"), "created_at": eastward}))
    with database.read() as session:
        kept = session.get_one(Tenant, "org_a").created_at
        assert kept == NOW
        assert kept.utcoffset() == timedelta(0)


def test_a_moment_without_a_zone_is_refused(database: Database) -> None:
    with pytest.raises(Exception, match="zone"), database.transaction() as session:
        session.add(Tenant(**{**_tenant("a"), "created_at": NOW.replace(tzinfo=None)}))


def test_a_read_session_does_not_write(database: Database) -> None:
    with pytest.raises(RuntimeError, match="read-only session"), database.read() as session:
        session.add(Tenant(**_tenant("a")))


def test_it_answers_a_ping(database: Database) -> None:
    asked: list[str] = []
    event.listen(
        database.db_engine, "before_cursor_execute", lambda *given: asked.append(str(given[2]))
    )
    database.ping()
    assert asked[-1] == "select 1"


def test_a_database_that_is_down_says_what_to_do() -> None:
    down = Database("postgresql://nobody@127.0.0.1:1/none", limits=Limits(connect_s=1))
    with pytest.raises(DependencyDown, match="TOLLHOUSE_DATABASE_URL"):
        down.ping()
    down.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "not an address", ""])
def test_another_kind_of_database_is_refused_by_name(url: str) -> None:
    with pytest.raises(SettingError, match="TOLLHOUSE_DATABASE_URL"):
        Database(url)


def test_options_of_a_postgresql_url_hold_beside_our_own(postgres_url: str) -> None:
    """Such as a schema or a role; what the operator sets wins."""
    asked = "-c%20search_path%3Dbooks%20-c%20lock_timeout%3D5000"
    database = Database(f"{postgres_url}?options={asked}")
    names = ("search_path", "lock_timeout", "timezone")
    with database.read() as session:
        found = [session.execute(text(f"show {name}")).scalar() for name in names]
    database.close()
    assert found == ["books", "5s", "UTC"]


def test_a_connection_that_is_used_while_its_database_is_closed_is_closed_too(
    postgres_url: str,
) -> None:
    database = Database(postgres_url)
    with database.read() as session:
        used = session.connection().connection.driver_connection
        database.close()
        assert session.scalar(text("select 1")) == 1
    assert used is not None and used.closed, "else it stays open until it is collected"
