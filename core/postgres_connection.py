"""Connections to PostgreSQL that do not wait for ever for a server that is gone.

The kernel ends a connection whose packets nobody acknowledges. Behind a balancer that acknowledges them
and passes nothing on, only the time without an answer tells.
"""

import time
from collections.abc import Generator
from typing import Any

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError


class TimedConnection(psycopg.Connection[Any]):
    """Ends itself when one round trip takes longer than `limit_s`; 0 is no limit."""

    limit_s = 0.0
    is_known = False  # it was checked out before

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        if self.limit_s:
            gen = self._ended_by(gen, time.monotonic() + self.limit_s)
        return super().wait(gen, *arguments, **named)

    def _ended_by(self, steps: Any, end: float) -> Generator[Any, Any, Any]:
        """The steps of a round trip. psycopg resumes them several times a second even if nothing came."""
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if time.monotonic() > end:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"the server did not answer within {self.limit_s:g} s"
                    )
                wanted = steps.send(ready)
        except StopIteration as done:
            return done.value

    def ping(self, answer_s: float) -> None:
        """One round trip outside of a transaction. psycopg.Error if it fails or takes longer."""
        limit_s, self.limit_s = self.limit_s, answer_s
        autocommit = self.autocommit
        try:
            self.set_autocommit(True)
            self.execute("select 1", prepare=False)
            self.set_autocommit(autocommit)
        finally:
            self.limit_s = limit_s


def time_connections(db_engine: Engine, *, answer_s: float, statement_s: float) -> None:
    """Make the engine's connections timed: a pooled one has to answer within `answer_s` before it is used
    again, and each statement within `statement_s`."""

    def _connect(_dialect: Any, _record: Any, arguments: Any, named: Any) -> TimedConnection:
        made = TimedConnection.connect(*arguments, **named)
        made.limit_s = statement_s
        return made

    def _check(connection: Any, _record: Any, _proxy: Any) -> None:
        connection.limit_s = statement_s
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
