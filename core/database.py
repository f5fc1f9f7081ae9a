"""The database, SQLite or PostgreSQL: the declarative base, sessions and dialect differences.

`read()` yields a session that must not write. `transaction()` commits on exit and is opened only at
an edge (a request handler, a task, a command); domain code flushes but never commits.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    DateTime,
    Dialect,
    Engine,
    Integer,
    MetaData,
    Numeric,
    Table,
    cast,
    create_engine,
    event,
    func,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DBAPIError, DontWrapMixin, OperationalError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from core.errors import BadRequest, DependencyDown, SettingError, TollhouseError
from core.money import decimal_of
from core.replica import Replica

# Constraints have names, so that a later migration can drop them on both databases.
_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


# What every PostgreSQL transaction runs with; the time-outs are in milliseconds.
_SESSION = {"timezone": "UTC", "lock_timeout": "30000", "statement_timeout": "300000"}
# Of a connection whose other side is gone without a word: libpq ends it, and the pool opens another.
# The last one is in milliseconds.
_KEEPALIVES = {
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
SQLITE_OVERFLOW = "integer overflow"  # what SQLite says of a sum that is too large
# Of SQLite, for each connection: of a list of ids of another length each, a hundred take megabytes.
_CACHED_STATEMENTS = 32


_writing = threading.local()


def check_no_transaction(what: str) -> None:
    """RuntimeError if this thread has an open write transaction: what waits for another machine or
    computes for long would keep its locks meanwhile, on SQLite those of the whole database."""
    if getattr(_writing, "count", 0):
        raise RuntimeError(f"{what} inside a transaction; do it before or after")


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMING)


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware datetime in UTC. SQLite stores no zone; it is added and removed here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"datetime without a timezone: {value.isoformat()}")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


MOST_UNITS = {"sqlite": 2**63 - 1, "postgresql": 10**38 - 1}
_TOO_LARGE = {
    "sqlite": "Give at most 9,223,372, or use PostgreSQL (TOLLHOUSE_DATABASE_URL).",
    "postgresql": "Give a smaller amount.",
}


class AmountTooLarge(BadRequest, DontWrapMixin):  # SQLAlchemy would make it a StatementError
    code = "amount_too_large"


class Units(TypeDecorator[int]):
    """Money in picounits. PostgreSQL: numeric(38,0). SQLite: 64 bits, up to 9.2 million major units.

    Raises AmountTooLarge for what the database cannot store.
    """

    impl = BigInteger
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Numeric(38, 0))
        return dialect.type_descriptor(BigInteger())

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is not None and type(value) is not int:
            raise TypeError(f"money is an int of picounits, not {type(value).__name__}")
        if value is not None and abs(value) > MOST_UNITS[dialect.name]:
            raise AmountTooLarge(
                f"The amount {decimal_of(value)} is larger than {dialect.name} stores.",
                next_step=_TOO_LARGE[dialect.name],
            )
        return value

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


class WholeSum(FunctionElement[int]):
    """The sum of two whole numbers. AmountTooLarge where SQLite would make a float of it."""

    name = "whole_sum"
    inherit_cache = True
    type = BigInteger()


@compiles(WholeSum)
def _sum_of(element: WholeSum, compiler: Any, **options: Any) -> str:
    one, other = (compiler.process(each, **options) for each in element.clauses)
    return f"({one} + {other})"


@compiles(WholeSum, "sqlite")
def _sum_of_sqlite(element: WholeSum, compiler: Any, **options: Any) -> str:
    one, other = (compiler.process(each, **options) for each in element.clauses)
    return whole_sum_sqlite(one, other)


def whole_sum_sqlite(one: str, other: str) -> str:
    """SQL of a sum. SQLite adds past 64 bits in floats; `abs` of the least number is an error there."""
    return (
        f"case typeof({one} + {other}) when 'real' then abs(-9223372036854775808)"
        f" else {one} + {other} end"
    )


def sum_too_large() -> AmountTooLarge:
    return AmountTooLarge(
        "A sum becomes larger than sqlite stores.",
        next_step="Use PostgreSQL (TOLLHOUSE_DATABASE_URL), which holds larger sums.",
    )


# SQLite autoincrements only INTEGER primary keys.
BigKey = BigInteger().with_variant(Integer(), "sqlite")
Json = JSON().with_variant(postgresql.JSONB(), "postgresql")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that PostgreSQL has for an answer before its connection counts as lost."""

    connect_s: int = 5
    answer_s: float = 5.0  # for a pooled connection, before it is used again
    statement_s: float = 330.0  # for one statement; the server ends it 30 s earlier by itself
    look_s: float = 4.0  # for a statement, before the server is asked whether it works on it


class Database:
    def __init__(
        self,
        url: str,
        *,
        read_url: str = "",
        pool_size: int = 8,
        limits: Limits | None = None,
        session_info: dict[Any, Any] | None = None,
    ) -> None:
        """`read_url` is a read replica's, for `report`; `limits` are PostgreSQL's; `session_info` is in
        each session's `info`."""
        self.url = url
        self.dialect = _dialect_of(url)
        limits = limits or Limits()
        self.db_engine = _make_engine(url, self.dialect, pool_size, limits)
        self._sessions = sessionmaker(self.db_engine, expire_on_commit=False, info=session_info)
        # A write transaction takes SQLite's lock at once; upgrading a read lock later can deadlock.
        writer = self.db_engine.execution_options(tollhouse_write=True)
        self._writers = sessionmaker(writer, expire_on_commit=False, info=session_info)
        self._replica = None
        if read_url:
            replica = _replica_engine(url, read_url, pool_size, limits)
            self._replica = Replica(replica, session_info)
        self._closed = False
        event.listen(self.db_engine, "checkin", self._close_returned)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with self._sessions() as session:
            yield session
            if session.new or session.dirty or session.deleted:
                raise RuntimeError("a read-only session was modified; use transaction()")

    @contextmanager
    def report(self, *, fresh: bool = False) -> Iterator[Session]:
        """A session that must not write, for pages and exports: on the read replica, which may be late,
        where there is one and it answers. `fresh`: with all that is committed by now."""
        if self._replica is None:
            with self.read() as session:
                yield session
            return
        with self.read() as primary:
            replica = self._replica.session(primary if fresh else None)
            if replica is None:
                yield primary
                return
            primary.rollback()  # its connection need not wait for the report
            with replica:
                yield replica

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """A session that must not write, whose queries all see the same state of the database."""
        with self._sessions() as session:
            if self.dialect == "postgresql":  # a read transaction of SQLite is a snapshot
                options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
                session.connection(execution_options=options)
            yield session

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with self._writers.begin() as session:
            _writing.count = getattr(_writing, "count", 0) + 1
            try:
                yield session
            finally:
                _writing.count -= 1

    def ping(self) -> None:
        """One round trip. DependencyDown if it fails."""
        try:
            with self.db_engine.connect() as connection:
                connection.execute(text("select 1"))
        except SQLAlchemyError as error:
            raise DependencyDown(
                f"The database does not answer: {_first_line(error)}.",
                next_step="Check TOLLHOUSE_DATABASE_URL and that the database server is running.",
            ) from error

    def close(self) -> None:
        """A connection that a thread still uses is closed when it is returned."""
        self._closed = True
        self.db_engine.dispose()
        if self._replica is not None:
            self._replica.close()

    def _close_returned(self, _connection: object, record: Any) -> None:
        if self._closed:
            record.invalidate()

    def explained(self, error: DBAPIError) -> TollhouseError | None:
        """What an operator can do about an error of the database; None if the code is at fault."""
        reason = _first_line(error.orig or error)
        if _schema_is_missing(error):
            return SettingError(
                f"The database {_redacted(self.url)} does not have this version's schema: {reason}.",
                next_step="Run `tollhouse migrate`; `tollhouse serve` does so when it starts.",
            )
        if isinstance(error, DataError):
            return unstorable(error)
        if isinstance(error, OperationalError):
            return DependencyDown(
                f"The database refused a command: {reason}.",
                next_step="Check TOLLHOUSE_DATABASE_URL and the state of the database server.",
            )
        return None


def unstorable(error: DataError) -> BadRequest:
    """For a value that PostgreSQL does not hold: a text that is longer than its column or has a NUL,
    a number out of range."""
    return BadRequest(
        f"The database cannot hold one of these values: {_first_line(error.orig or error)}.",
        next_step="Shorten it, or leave out characters that do not print.",
        code="value_not_storable",
    )


def insert_new(session: Session, table: Table, rows: Sequence[dict[str, Any]], *key: str) -> int:
    """Insert the rows whose key does not exist yet; returns how many were inserted."""
    if not rows:
        return 0
    insert: Any = (
        postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    )
    statement = insert(table).on_conflict_do_nothing(index_elements=list(key))
    result = session.connection().execute(statement.returning(table.c[key[0]]), list(rows))
    return len(result.all())


def epoch_bucket(column: Any, dialect: str, seconds: int) -> ColumnElement[int]:
    """SQL for the start of the column's time bucket of `seconds`, in seconds since 1970."""
    if dialect == "postgresql":
        epoch: ColumnElement[int] = cast(func.floor(func.extract("epoch", column)), BigInteger)
    else:
        # Of the whole second: SQLite rounds `%s` to milliseconds, and the last half of one would be of
        # the next bucket.
        epoch = cast(func.strftime("%s", func.substr(column, 1, 19)), BigInteger)
    return epoch - epoch % seconds


def _dialect_of(url: str) -> str:
    name = _backend(url)
    if name not in ("sqlite", "postgresql"):
        raise SettingError(
            f"TOLLHOUSE_DATABASE_URL is not a SQLite or PostgreSQL address: {_redacted(url)!r}.",
            next_step="Write sqlite:///path or postgresql+psycopg://user:password@host/name.",
        )
    return name


def _backend(url: str) -> str:
    try:
        return make_url(url).get_backend_name()
    except SQLAlchemyError:
        return ""


def _replica_engine(url: str, read_url: str, pool_size: int, limits: Limits) -> Engine:
    for each in (url, read_url):
        if _backend(each) != "postgresql":
            raise SettingError(
                f"TOLLHOUSE_READ_DATABASE_URL names a replica of PostgreSQL, but {_redacted(each)!r} is "
                "none.",
                next_step="Unset it, or give both addresses as postgresql+psycopg://….",
            )
    return _make_postgres_engine(read_url, pool_size, replace(limits, connect_s=2))


def _make_engine(url: str, dialect: str, pool_size: int, limits: Limits) -> Engine:
    if dialect == "postgresql":
        return _make_postgres_engine(url, pool_size, limits)
    path = make_url(url).database
    if path and path != ":memory:":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    db_engine = create_engine(
        url,
        connect_args={
            "timeout": 30,
            "check_same_thread": False,
            "cached_statements": _CACHED_STATEMENTS,
        },
    )
    event.listen(db_engine, "connect", _prepare_sqlite)
    event.listen(db_engine, "begin", _begin_sqlite)
    event.listen(db_engine, "handle_error", _name_overflow)
    return db_engine


def _make_postgres_engine(url: str, pool_size: int, limits: Limits) -> Engine:
    """With `?pooler=transaction`, each transaction may run on another server connection: it sets what
    it needs itself, and nothing is prepared for a later one."""
    address = make_url(url).set(drivername="postgresql+psycopg")
    pooler = address.query.get("pooler", "")
    if pooler not in ("", "transaction"):
        raise SettingError(
            f"TOLLHOUSE_DATABASE_URL has pooler={pooler!r}.",
            next_step="Write ?pooler=transaction behind PgBouncer in transaction mode, else nothing.",
        )
    arguments: dict[str, Any] = {"connect_timeout": limits.connect_s}
    arguments |= {name: n for name, n in _KEEPALIVES.items() if name not in address.query}
    if pooler:
        arguments["prepare_threshold"] = None
    else:
        own = [f"-c {name}={value}" for name, value in _SESSION.items()]
        arguments["options"] = " ".join([*own, *_values(address.query.get("options", ()))])
    db_engine = create_engine(
        address.difference_update_query(["pooler"]),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=10,
        connect_args=arguments,
    )
    from core.postgres_connection import time_connections  # psycopg is for PostgreSQL alone

    time_connections(
        db_engine,
        answer_s=limits.answer_s,
        statement_s=limits.statement_s,
        look_s=0.0
        if pooler
        else limits.look_s,  # a pooler's connections have no process of their own
    )
    if pooler:
        event.listen(db_engine, "begin", _set_local)
    return db_engine


def _values(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given


def _set_local(connection: Any) -> None:
    """One round trip a transaction."""
    connection.exec_driver_sql(
        "; ".join(f"set local {name} = '{value}'" for name, value in _SESSION.items())
    )


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # `_begin_sqlite` emits BEGIN
    # Deleted texts are overwritten, so that an erasure leaves none in the file.
    settings = ("journal_mode=wal", "synchronous=normal", "foreign_keys=on", "secure_delete=on")
    for pragma in settings:
        connection.execute(f"pragma {pragma}")


def _begin_sqlite(connection: Any) -> None:
    write = connection.get_execution_options().get("tollhouse_write", False)
    connection.exec_driver_sql("begin immediate" if write else "begin")


def _name_overflow(context: Any) -> None:
    if str(context.original_exception) == SQLITE_OVERFLOW:
        context.chained_exception = sum_too_large()


def _redacted(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "<not an address>"


def _schema_is_missing(error: DBAPIError) -> bool:
    """SQLite says it in words, PostgreSQL by the codes undefined_table and undefined_column."""
    code = getattr(error.orig, "sqlstate", None)
    return code in ("42P01", "42703") or str(error.orig).startswith(
        ("no such table", "no such column")
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
