"""Parked records of the spool files: list them, put them back, ship or drop them.

A live process owns its file's outbox, so an operator's command never writes there: it ships parked
records itself and deletes them from `parked`.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError

from gateway.metering.spool import SpoolFile
from gateway.metering.spool_records import OPENED, OPERATION, decode_outbox, request_id_of
from gateway.metering.spool_statements import Statement, return_to_outbox
from gateway.metering.usage_sink import UsageSink

# SQLSTATE classes of PostgreSQL: data exception, integrity constraint violation.
_PERMANENT = ("22", "23")


def is_permanent(error: BaseException) -> bool:
    """True for faults of the record: its data or a constraint. Everything else passes or is fixed
    by an operator: an outage, a read-only standby, a schema that is not migrated yet, a pooler."""
    if isinstance(error, DBAPIError):
        sqlstate = getattr(error.orig, "sqlstate", None)
        if sqlstate is not None:
            return str(sqlstate).startswith(_PERMANENT)
        return isinstance(error, DataError | IntegrityError)  # SQLite has no SQLSTATE
    if isinstance(error, StatementError) and error.orig is not None:
        return is_permanent(error.orig)
    return isinstance(error, ValueError | LookupError | TypeError | OverflowError)


def brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    file: str  # name of the spool file
    seq: int
    topic: str  # usage | moderation | line | receipt | opened | operation
    request_id: str  # "" if the record cannot be read
    reason: str


def parked_records(directory: Path) -> list[ParkedRecord]:
    """The parked records of this machine's spool files."""
    found = []
    for path in sorted(directory.glob("*.db")):
        with closing(_open(path)) as connection:
            rows = connection.execute("select seq, topic, body, reason from parked order by seq")
            found += [
                ParkedRecord(path.name, seq, topic, request_id_of(topic, body), reason)
                for seq, topic, body, reason in rows
            ]
    return found


def release(directory: Path, sink: UsageSink) -> int:
    """Ship parked records, one transaction each; returns how many were stored. Records that are
    still refused stay, and open requests wait until the file is adopted."""
    stored = 0
    for path in sorted(directory.glob("*.db")):
        with closing(_open(path)) as connection:
            query = "select seq, topic, body from parked where topic not in (?, ?) order by seq"
            for seq, topic, body in connection.execute(query, (OPENED, OPERATION)).fetchall():
                try:
                    sink.record(decode_outbox([(seq, topic, body)]))
                except Exception as error:
                    if not is_permanent(error):
                        raise
                    reason = (brief(error), seq)
                    connection.execute("update parked set reason = ? where seq = ?", reason)
                    continue
                connection.execute("delete from parked where seq = ?", (seq,))
                stored += 1
    return stored


def drop(directory: Path, name: str, seq: int) -> bool:
    """Delete one parked record; False if there is none."""
    path = directory / Path(name).name
    if not path.exists():
        return False
    with closing(_open(path)) as connection:
        return connection.execute("delete from parked where seq = ?", (seq,)).rowcount == 1


def retry_parked(file: SpoolFile) -> None:
    """Put parked records back where they came from. Only for a file whose lock is held."""
    rows = file.connection.execute("select seq, topic, body from parked order by seq").fetchall()
    statements: list[Statement] = []
    for seq, topic, body in rows:
        request_id = request_id_of(topic, body)
        if topic == OPERATION or (topic == OPENED and not request_id):
            continue
        if topic == OPENED:
            insert = "insert or ignore into opened values (?, ?)"
            statements.append(Statement(insert, (request_id, body)))
        else:
            statements.append(return_to_outbox(topic, body))
        statements.append(Statement("delete from parked where seq = ?", (seq,)))
    if statements:
        file.commit(statements)


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=10, isolation_level=None)
