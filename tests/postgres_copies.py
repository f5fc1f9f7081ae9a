"""Copies of a migrated PostgreSQL database, which tests use one after another.

To drop a database PostgreSQL writes to the disk what it holds of all of them, and waits. The copy that a
test has left is emptied instead, which takes some milliseconds, and is dropped where more than rows has
changed.
"""

import uuid
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

_OTHERS = """select count(pg_terminate_backend(pid)) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()"""
# Which transactions wrote the rows of the catalogue: those are copied as they are. Its list of tables is
# also written where a table is analysed, and is compared by what it says.
_SCHEMA = """select md5(string_agg(line, '|' order by line)) from (
  select concat_ws(' ', relname, relkind, relacl, reloptions, relrowsecurity) as line
  from pg_class where relnamespace = 'public'::regnamespace
  union all select concat_ws(' ', 'pg_attribute', count(*), sum(xmin::text::bigint)) from pg_attribute
  union all select concat_ws(' ', 'pg_attrdef', count(*), sum(xmin::text::bigint)) from pg_attrdef
  union all select concat_ws(' ', 'pg_index', count(*), sum(xmin::text::bigint)) from pg_index
  union all select concat_ws(' ', 'pg_trigger', count(*), sum(xmin::text::bigint)) from pg_trigger
  union all select concat_ws(' ', 'pg_constraint', count(*), sum(xmin::text::bigint)) from pg_constraint
  union all select concat_ws(' ', 'pg_proc', count(*), sum(xmin::text::bigint)) from pg_proc
  union all select concat_ws(' ', 'pg_namespace', count(*), sum(xmin::text::bigint)) from pg_namespace
  union all select concat_ws(' ', 'pg_inherits', count(*), sum(xmin::text::bigint)) from pg_inherits
  union all select concat_ws(' ', setrole, setconfig) from pg_db_role_setting
  where setdatabase = (select oid from pg_database where datname = current_database())
) as lines"""
_TABLES = """select relname from pg_class
where relnamespace = 'public'::regnamespace and relkind = 'r' order by relname"""
# Rows that were deleted keep their place.
_LARGE = """select relname from pg_class
where relnamespace = 'public'::regnamespace and relkind = 'r' and pg_relation_size(oid) > 1 << 20"""
_SEQUENCES = """select sequencename, last_value from pg_sequences
where schemaname = 'public' and last_value is not null order by sequencename"""


@dataclass(frozen=True)
class _Content:
    schema: str
    rows: dict[str, str]  # a hash of those of each table that has any
    sequences: dict[str, int]  # those that were drawn from


@dataclass
class Copies:
    server: str  # the URL of its database for administration
    template: str
    _free: list[str] = field(default_factory=list)
    _new: _Content | None = None

    def url(self, name: str) -> str:
        return f"{self.server.rpartition('/')[0]}/{name}"

    def take(self) -> str:
        """The name of one that is as new, and that none had before.

        A commit does not wait for the disk: no test takes the power from the server, and what a killed
        client committed is there.
        """
        name = f"tollhouse_test_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.server, autocommit=True, connect_timeout=5) as admin:
            if self._free:
                admin.execute(f"alter database {self._free.pop()} rename to {name}")
            else:
                admin.execute(f"create database {name} template {self.template}")
                admin.execute(f"alter database {name} set synchronous_commit = off")
        if self._new is None:
            with psycopg.connect(self.url(name), autocommit=True) as session:
                self._new = _content(session)
        return name

    def give_back(self, name: str) -> None:
        try:
            with psycopg.connect(self.url(name), autocommit=True, connect_timeout=5) as session:
                emptied = self._new is not None and _emptied(session, self._new)
        except psycopg.Error:  # of a role that may not, or of a database that a test dropped
            emptied = False
        if emptied:
            self._free.append(name)
        else:
            self._drop(name)

    def close(self) -> None:
        while self._free:
            self._drop(self._free.pop())

    def _drop(self, name: str) -> None:
        with psycopg.connect(self.server, autocommit=True, connect_timeout=5) as admin:
            admin.execute(f"drop database if exists {name} with (force)")


def _emptied(session: psycopg.Connection, new: _Content) -> bool:
    """Whether it has again what a new one has: nothing but rows was changed, and those are gone."""
    while session.execute(_OTHERS).fetchall() != [(0,)]:
        pass
    if session.execute(_SCHEMA).fetchall() != [(new.schema,)] or session.execute(_LARGE).fetchall():
        return False
    session.execute("set session_replication_role = replica")  # what is append-only, too
    for name in _filled(session):
        if name not in new.rows:
            session.execute(sql.SQL("delete from {}").format(sql.Identifier(name)))
    for name, value in session.execute(_SEQUENCES).fetchall():
        if new.sequences.get(name) != value:
            session.execute(sql.SQL("alter sequence {} restart").format(sql.Identifier(name)))
    return _content(session, new.schema) == new


def _content(session: psycopg.Connection, schema: str = "") -> _Content:
    schema = schema or session.execute(_SCHEMA).fetchall()[0][0]
    rows = {name: _hash(session, name) for name in _filled(session)}
    return _Content(schema, rows, dict(session.execute(_SEQUENCES).fetchall()))


def _filled(session: psycopg.Connection) -> list[str]:
    tables = [name for (name,) in session.execute(_TABLES).fetchall()]
    asked = sql.SQL(" union all ").join(
        sql.SQL("select {} where exists (select from {})").format(
            sql.Literal(name), sql.Identifier(name)
        )
        for name in tables
    )
    return [name for (name,) in session.execute(asked).fetchall()]


def _hash(session: psycopg.Connection, table: str) -> str:
    asked = sql.SQL("select md5(string_agg(t::text, '|' order by t::text)) from {} as t")
    return str(session.execute(asked.format(sql.Identifier(table))).fetchall()[0][0])
