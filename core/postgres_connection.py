"""Connections to PostgreSQL that do not wait for ever for a server that is gone.

The kernel ends a connection whose packets nobody acknowledges. Behind a balancer that acknowledges them
and passes nothing on, a silent connection looks like a slow statement. A connection that waits for long
therefore asks the server, on another connection, whether it still works on the statement.
"""

import logging
import time
from collections.abc import Generator
from typing import Any

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError

from core import metrics

log = logging.getLogger("tollhouse.database")
# How often a server is asked about a statement without an answer, and how often it has to deny, one
# second apart: its answer may be under way.
_LOOK_EVERY_S, _LOOK_AGAIN_S, _DENIALS = 15.0, 1.0, 2
_LOOK_LIMIT_S = 4
# From 0 on: an alert on the increase of a counter does not see its first sample.
_closed = metrics.silent_connections.labels("postgresql")
# A server that waits for its client to read has nothing else to do.
_WORKS = (
    "select state = 'active' and wait_event_type is distinct from 'Client'"
    " from pg_stat_activity where pid = %s"
)


class TimedConnection(psycopg.Connection[Any]):
    """Ends itself when one round trip takes longer than `limit_s`; 0 is no limit. With `look_s` also when
    the server, asked after that time, works on nothing for it."""

    limit_s = 0.0
    look_s = 0.0
    opened_with: tuple[Any, Any] = ((), {})  # its arguments
    is_known = False  # it was checked out before

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        if self.limit_s or self.look_s:
            gen = self._watched(gen)
        return super().wait(gen, *arguments, **named)

    def _watched(self, steps: Any) -> Generator[Any, Any, Any]:
        """The steps of a round trip. psycopg resumes them several times a second even if nothing came."""
        started = time.monotonic()
        end = started + (self.limit_s or float("inf"))
        look = started + (self.look_s or float("inf"))
        denials = 0
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                now = time.monotonic()
                if not ready and now > look:
                    denials = 0 if self._is_working() else denials + 1
                    look = time.monotonic() + (_LOOK_AGAIN_S if denials else _LOOK_EVERY_S)
                if now > end or denials >= _DENIALS:
                    self._end(now - started)
                wanted = steps.send(ready)
        except StopIteration as done:
            return done.value

    def _end(self, waited_s: float) -> None:
        """Raises, because the connection is silent."""
        self.pgconn.finish()
        _closed.inc()
        log.warning("a connection to PostgreSQL was silent for %.0f s and is closed", waited_s)
        raise psycopg.OperationalError(f"the server did not answer within {waited_s:.3g} s")

    def _is_working(self) -> bool:
        """Whether the server works on this connection's statement, or cannot be asked although it
        answers: it may have no connection left."""
        arguments, named = self.opened_with
        limits = {"connect_timeout": _LOOK_LIMIT_S, "autocommit": True}
        try:
            with TimedConnection.connect(*arguments, **named | limits) as other:
                other.limit_s = _LOOK_LIMIT_S
                found = other.execute(_WORKS, [self.info.backend_pid], prepare=False).fetchone()
        except psycopg.OperationalError as error:
            return "FATAL" in str(error)
        return found is not None and bool(found[0])

    def ping(self, answer_s: float) -> None:
        """One round trip outside of a transaction. psycopg.Error if it fails or takes longer."""
        (limit_s, look_s), (self.limit_s, self.look_s) = (self.limit_s, self.look_s), (answer_s, 0)
        autocommit = self.autocommit
        try:
            self.set_autocommit(True)
            self.execute("select 1", prepare=False)
            self.set_autocommit(autocommit)
        finally:
            self.limit_s, self.look_s = limit_s, look_s


def time_connections(
    db_engine: Engine, *, answer_s: float, statement_s: float, look_s: float
) -> None:
    """Make the engine's connections timed: a pooled one has to answer within `answer_s` before it is used
    again, and each statement within `statement_s`, or `look_s` if the server does not work on it; 0
    where the server cannot tell, as behind a pooler."""

    def _connect(_dialect: Any, _record: Any, arguments: Any, named: Any) -> TimedConnection:
        made = TimedConnection.connect(*arguments, **named)
        made.limit_s, made.look_s = statement_s, look_s
        made.opened_with = arguments, named
        return made

    def _check(connection: Any, _record: Any, _proxy: Any) -> None:
        connection.limit_s, connection.look_s = statement_s, look_s
        if connection.is_known:
            try:
                connection.ping(answer_s)
            except psycopg.Error as error:
                raise InvalidatePoolError(f"the server did not answer: {error}") from error
        connection.is_known = True

    event.listen(db_engine, "do_connect", _connect)
    event.listen(db_engine, "checkout", _check)


def allow_long_statements(connection: Any) -> None:
    """Until SQLAlchemy's connection returns to its pool, its statements may take any time."""
    timed = connection.connection.driver_connection
    if isinstance(timed, TimedConnection):
        timed.limit_s = 0.0
