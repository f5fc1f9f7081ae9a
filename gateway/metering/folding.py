"""Applies the operations of a spool's log to its tables, within a transaction: together, or one by one
where the tables refuse some, which are parked.
"""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.metering.spool_records import OPERATION
from gateway.metering.spool_statements import (
    DELETIONS,
    INSERT_OPENED,
    INSERT_OUTBOX,
    LOGGED,
    REPLACE_OPENED,
    Operation,
    folded,
)

# An operational error (a full disk, a lock) may pass; these are the same at every attempt.
REFUSALS = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
)
Execute = Callable[..., sqlite3.Cursor]
_PARK = "insert into parked (topic, body, reason) values (?, ?, ?)"


def apply_together(execute: Execute, operations: list[Operation]) -> int:
    """Returns how many rows the outbox has less than was appended."""
    gone = 0
    for sql, values in folded(operations):
        rows = execute(sql, values).rowcount
        gone += rows if sql in DELETIONS else 0
    return gone


def apply_singly(execute: Execute, operations: list[Operation]) -> int:
    """As `apply_together`, and parks what is refused."""
    gone = 0
    for number, values in operations:
        sql = LOGGED[number]
        execute("savepoint one")
        try:
            rows = execute(REPLACE_OPENED if sql == INSERT_OPENED else sql, values).rowcount
        except REFUSALS as error:
            execute("rollback to one")
            execute(_PARK, (*_kept(number, values), f"the spool refused it: {error}"))
            gone += sql == INSERT_OUTBOX
        else:
            gone += rows if sql in DELETIONS else 0
        execute("release one")
    return gone


def _kept(number: int, values: tuple[Any, ...]) -> tuple[str, bytes]:
    """Topic and body of the parked row."""
    if LOGGED[number] == INSERT_OUTBOX and len(values) == 3 and isinstance(values[2], bytes):
        return str(values[1]), values[2]
    return OPERATION, msgspec.msgpack.encode((number, values))
