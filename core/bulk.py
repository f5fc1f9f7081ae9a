"""Many rows in one go: COPY on PostgreSQL, one prepared statement on SQLite.

By hand because SQLAlchemy builds a dictionary and a parameter list a row, which costs more than all
of rating does.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, cast

import psycopg
from psycopg import Connection, sql
from sqlalchemy import Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from core.database import UtcDateTime

Row = Sequence[Any]


def insert_new(
    session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row], *key: str
) -> int:
    """Insert the rows whose key is not there yet, in the order of its first column; returns how
    many. What lies in a JSON column is given as JSON."""
    if not rows:
        return 0
    at = list(columns).index(key[0])
    ordered = sorted(rows, key=lambda row: row[at])  # the same order everywhere: no deadlocks
    if session.get_bind().dialect.name == "postgresql":
        return _merge(session, table, columns, ordered, ", ".join(key))
    ending = f" on conflict ({', '.join(key)}) do nothing"
    return _insert_sqlite(session, table, columns, ordered, ending)


def insert_all(session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Insert rows that cannot be there yet; a second one with the key is an error."""
    if not rows:
        return
    if session.get_bind().dialect.name == "postgresql":
        _copy(_driver(session), table.name, columns, rows)
    else:
        _insert_sqlite(session, table, columns, rows, "")


def add_up(
    session: Session,
    table: Table,
    columns: Sequence[str],
    rows: Sequence[Row],
    key: Sequence[str],
    sums: Sequence[str],
) -> None:
    """Insert rows, or add their sums to the row that has their key."""
    if not rows:
        return
    ending = f" on conflict ({', '.join(key)}) do update set "
    ending += ", ".join(f"{name} = {table.name}.{name} + excluded.{name}" for name in sums)
    if session.get_bind().dialect.name == "postgresql":
        staging = _stage(session, table, columns, rows)
        names = ", ".join(columns)
        order = ", ".join(key)
        session.execute(
            text(
                f"insert into {table.name} ({names}) select {names} from {staging}"
                f" order by {order}{ending}"
            )
        )
        session.execute(text(f"truncate {staging}"))
    else:
        _insert_sqlite(session, table, columns, rows, ending)


def _driver(session: Session) -> Connection[Any]:
    return cast("Connection[Any]", session.connection().connection.driver_connection)


def _copy(driver: Connection[Any], name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(name), _names(columns))
    told = _told_as_usual(f"copy {name}", psycopg.Error)
    with told, driver.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _stage(session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows in a temporary table of this connection; returns its name."""
    staging = f"incoming_{table.name}"
    session.execute(
        text(
            f"create temporary table if not exists {staging} (like {table.name} including defaults)"
            " on commit delete rows"
        )
    )
    _copy(_driver(session), staging, columns, rows)
    return staging


def _merge(
    session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row], key: str
) -> int:
    staging = _stage(session, table, columns, rows)
    names = ", ".join(columns)
    result = session.connection().execute(
        text(
            f"insert into {table.name} ({names}) select {names} from {staging} order by {key}"
            f" on conflict ({key}) do nothing"
        )
    )
    session.execute(text(f"truncate {staging}"))
    return int(result.rowcount)


def _insert_sqlite(
    session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row], ending: str
) -> int:
    marks = ", ".join("?" * len(columns))
    statement = f"insert into {table.name} ({', '.join(columns)}) values ({marks}){ending}"
    moments = [
        index for index, name in enumerate(columns) if isinstance(table.c[name].type, UtcDateTime)
    ]
    cursor = cast("Any", session.connection().connection.driver_connection).cursor()
    with _told_as_usual(statement, sqlite3.Error):
        cursor.executemany(statement, [_plain(row, moments) for row in rows])
    return int(cursor.rowcount)


@contextmanager
def _told_as_usual(statement: str, base: type[Exception]) -> Iterator[None]:
    """The driver's errors as SQLAlchemy's, as from every other statement."""
    try:
        yield
    except base as error:
        raise DBAPIError.instance(statement, None, error, base) from error


def _plain(row: Row, moments: list[int]) -> list[Any]:
    """SQLite keeps moments as text, in the form that SQLAlchemy reads."""
    plain = list(row)
    for index in moments:
        moment = plain[index]
        if isinstance(moment, datetime):
            plain[index] = (
                moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
            )
    return plain


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))
