"""Bulk inserts: one statement with one parameter on PostgreSQL, one prepared statement on SQLite.

Written without SQLAlchemy's insert, which builds a dictionary and a parameter list per row and costs
more than all of rating. On PostgreSQL, rows that may already exist are sent as one JSON document:
one round trip, whereas COPY needs a staging table and writes every row twice. Rows that cannot exist
yet use COPY directly.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import msgspec
from sqlalchemy import JSON, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from core.database import SQLITE_OVERFLOW, UtcDateTime, sum_too_large, whole_sum_sqlite

if TYPE_CHECKING:  # on SQLite, psycopg is not imported: it costs every command of the CLI 0.1 s
    from psycopg import Connection, sql

Row = Sequence[Any]
_encode = msgspec.json.Encoder().encode


def insert_new(
    session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row], *key: str
) -> int:
    """Insert the rows whose key does not exist yet and return how many were inserted. Rows are
    sorted by the first key column; values of JSON columns must already be encoded."""
    if not rows:
        return 0
    index = list(columns).index(key[0])
    ordered = sorted(
        rows, key=lambda row: row[index]
    )  # one lock order in every process prevents deadlocks
    conflict_clause = f" on conflict ({', '.join(key)}) do nothing"
    if session.get_bind().dialect.name == "postgresql":
        return _merge(session, table, columns, ordered, conflict_clause)
    return _insert_sqlite(session, table, columns, ordered, conflict_clause)


def insert_all(session: Session, table: Table, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Insert rows that do not exist yet; a duplicate key is an error."""
    if not rows:
        return
    if session.get_bind().dialect.name == "postgresql":
        _copy(_driver(session), table.name, columns, rows)
    else:
        _insert_sqlite(session, table, columns, rows, "")


def upsert_sums(
    session: Session,
    table: Table,
    columns: Sequence[str],
    rows: Sequence[Row],
    key: Sequence[str],
    sums: Sequence[str],
) -> None:
    """Insert rows, or add the columns `sums` to the existing row with the same key."""
    if not rows:
        return
    postgres = session.get_bind().dialect.name == "postgresql"
    add = "{} + {}".format if postgres else whole_sum_sqlite
    conflict_clause = f" on conflict ({', '.join(key)}) do update set "
    conflict_clause += ", ".join(
        f"{name} = {add(f'{table.name}.{name}', f'excluded.{name}')}" for name in sums
    )
    if postgres:
        indexes = [list(columns).index(name) for name in key]
        ordered = sorted(rows, key=lambda row: [row[index] for index in indexes])
        _merge(session, table, columns, ordered, conflict_clause)
    else:
        _insert_sqlite(session, table, columns, rows, conflict_clause)


def _driver(session: Session) -> "Connection[Any]":
    return cast("Connection[Any]", session.connection().connection.driver_connection)


def _copy(
    driver: "Connection[Any]", name: str, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    import psycopg
    from psycopg import sql

    statement = sql.SQL("copy {} ({}) from stdin").format(
        sql.Identifier(name), _identifiers(columns)
    )
    errors = _sqlalchemy_errors(f"copy {name}", psycopg.Error)
    with errors, driver.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _merge(
    session: Session,
    table: Table,
    columns: Sequence[str],
    rows: Sequence[Row],
    conflict_clause: str,
) -> int:
    row_type, statement, documents = _json_insert(table, tuple(columns))
    if documents:
        rows = [_with_json(row, documents) for row in rows]
    document = _encode([row_type(*row) for row in rows]).decode()
    result = session.connection().exec_driver_sql(statement + conflict_clause, (document,))
    return int(result.rowcount)


@lru_cache(maxsize=64)
def _json_insert(table: Table, columns: tuple[str, ...]) -> tuple[Any, str, tuple[int, ...]]:
    """The struct that encodes a row, the statement, and the indexes of the JSON columns."""
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    types = [table.c[name].type.dialect_impl(dialect) for name in columns]
    names = ", ".join(columns)
    column_types = ", ".join(
        f"{name} {kind.compile(dialect=dialect)}" for name, kind in zip(columns, types, strict=True)
    )
    statement = (
        f"insert into {table.name} ({names})"
        f" select {names} from json_to_recordset(%s::json) as rows ({column_types})"
    )
    documents = tuple(index for index, kind in enumerate(types) if isinstance(kind, JSON))
    return msgspec.defstruct("Row", columns), statement, documents


def _with_json(row: Row, indexes: Sequence[int]) -> list[Any]:
    values = list(row)
    for index in indexes:
        values[index] = msgspec.Raw(values[index].encode())
    return values


def _insert_sqlite(
    session: Session,
    table: Table,
    columns: Sequence[str],
    rows: Sequence[Row],
    conflict_clause: str,
) -> int:
    placeholders = ", ".join("?" * len(columns))
    statement = (
        f"insert into {table.name} ({', '.join(columns)}) values ({placeholders}){conflict_clause}"
    )
    datetimes = [
        index for index, name in enumerate(columns) if isinstance(table.c[name].type, UtcDateTime)
    ]
    cursor = cast("Any", session.connection().connection.driver_connection).cursor()
    with _sqlalchemy_errors(statement, sqlite3.Error):
        cursor.executemany(statement, [_sqlite_row(row, datetimes) for row in rows])
    return int(cursor.rowcount)


@contextmanager
def _sqlalchemy_errors(statement: str, base: type[Exception]) -> Iterator[None]:
    """Re-raise the driver's errors as SQLAlchemy's, like those of every other statement."""
    try:
        yield
    except base as error:
        if str(error) == SQLITE_OVERFLOW:
            raise sum_too_large() from error
        raise DBAPIError.instance(statement, None, error, base) from error


def _sqlite_row(row: Row, datetimes: list[int]) -> list[Any]:
    """SQLite stores timestamps as text, in the format that SQLAlchemy reads."""
    plain = list(row)
    for index in datetimes:
        value = plain[index]
        if isinstance(value, datetime):
            plain[index] = value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
    return plain


def _identifiers(columns: Sequence[str]) -> "sql.Composed":
    from psycopg import sql

    return sql.SQL(", ").join(map(sql.Identifier, columns))
