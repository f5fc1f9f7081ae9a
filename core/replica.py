"""A read replica of PostgreSQL for pages and exports: read-only, late, and dispensable."""

import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

log = logging.getLogger("tollhouse.database")
_AWAY_S = 10.0  # how long a replica that failed is left alone
_CATCH_UP_S = 5.0


class Replica:
    """Sessions of a replica whose transactions are READ ONLY, whatever its role may do."""

    def __init__(self, db_engine: Engine, session_info: dict[Any, Any] | None) -> None:
        self._engine = db_engine.execution_options(postgresql_readonly=True)
        self._sessions = sessionmaker(self._engine, expire_on_commit=False, info=session_info)
        self._away_until = 0.0

    def session(self, primary: Session | None) -> Session | None:
        """None where the replica does not answer. With `primary`, None also where it has not replayed
        what the primary has committed by now."""
        if time.monotonic() < self._away_until:
            return None
        session = self._sessions()
        try:
            session.connection()
            if primary is None or self._has_caught_up(primary):
                return session
            log.warning("the read replica is behind by more than %.0f s", _CATCH_UP_S)
        except SQLAlchemyError as error:
            self._away_until = time.monotonic() + _AWAY_S
            log.warning("the read replica does not answer; reading from the primary: %s", error)
        session.close()
        return None

    def close(self) -> None:
        self._engine.dispose()

    def _has_caught_up(self, primary: Session, sleep: Callable[[float], None] = time.sleep) -> bool:
        """A copy that does not replay the primary's log, such as by logical replication, cannot tell."""
        if primary.scalar(text("select pg_is_in_recovery()")):
            return True
        position = str(primary.scalar(text("select pg_current_wal_lsn()::text")))
        query = text(
            "select pg_last_wal_replay_lsn() is null or"
            " pg_last_wal_replay_lsn() >= cast(:position as pg_lsn)"
        )
        deadline = time.monotonic() + _CATCH_UP_S
        with self._engine.connect() as connection:
            while not connection.execute(query, {"position": position}).scalar():
                connection.rollback()
                if time.monotonic() > deadline:
                    return False
                sleep(0.05)
        return True
