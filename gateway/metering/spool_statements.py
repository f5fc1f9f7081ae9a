"""What the spool writes: statements on its tables, and their form in the log before them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from core.batches.jobs import LineResult
from core.events import EngineCount, ModerationEvent, OpenedRequest, UsageEvent
from gateway.metering.spool_records import LINE, MODERATION, OPENED, RECEIPT, USAGE

_encode = msgspec.msgpack.Encoder().encode
INSERT_OPENED = "insert into opened values (?, ?)"
UPDATE_OPENED = "update opened set body = ? where request_id = ?"
DELETE_OPENED = "delete from opened where request_id = ?"
INSERT_OUTBOX = "insert into outbox values (?, ?, ?)"
DELETE_SHIPPED = "delete from outbox where seq <= ?"
PARK_ROW = (
    "insert into parked (topic, body, reason) select topic, body, ? from outbox where seq = ?"
)
DELETE_ROW = "delete from outbox where seq = ?"
# An id that is open already would fail the whole log, for good.
REPLACE_OPENED = "insert or replace into opened values (?, ?)"
DELETIONS = (DELETE_SHIPPED, DELETE_ROW)  # from the outbox
_READS_OUTBOX = (*DELETIONS, PARK_ROW)
_ROW = 3  # values of a row of the outbox
_MOST_ROWS = 256  # of one statement; a power of two
# By their numbers in the log. A place is never given to another statement.
LOGGED = (
    INSERT_OPENED,
    UPDATE_OPENED,
    DELETE_OPENED,
    INSERT_OUTBOX,
    DELETE_SHIPPED,
    PARK_ROW,
    DELETE_ROW,
)
_NUMBERS = {sql: number for number, sql in enumerate(LOGGED)}

# One of LOGGED, by its number, and its values.
Operation = tuple[int, tuple[object, ...]]
_operations = msgspec.msgpack.Decoder(list[Operation])


class Statement(NamedTuple):
    sql: str
    values: tuple[object, ...]
    outbox: int = 0  # what each row that it changes adds to the count of the outbox
    is_opening: bool = False  # of a request whose client gets an error if the disk refuses it
    is_numbered: bool = False  # the file puts the next row number of the outbox before its values


def operations_of(statements: Iterable[Statement], numbers: Iterator[int]) -> list[Operation]:
    """Their form in the log. `numbers`: of the outbox's next rows."""
    return [
        (_NUMBERS[sql], (next(numbers), *values) if is_numbered else values)
        for sql, values, _, _, is_numbered in statements
    ]


def encode_operations(operations: list[Operation]) -> bytes:
    return _encode(operations)


def decode_operations(frames: Iterable[bytes]) -> list[Operation]:
    """Raises ValueError for operations that this version does not know."""
    found = [each for frame in frames for each in _operations.decode(frame)]
    unknown = {number for number, _ in found if not 0 <= number < len(LOGGED)}
    if unknown:
        raise ValueError(f"the log has operations of another version: {sorted(unknown)}")
    return found


def folded(operations: list[Operation]) -> Iterator[tuple[str, Sequence[object]]]:
    """The statements that apply a log to the tables. SQLite releases the interpreter at each, and a
    busy event loop takes it for half a millisecond: so rows of the outbox are inserted many at once.
    """
    rows: list[object] = []
    for number, values in _without_ended(operations):
        sql = LOGGED[number]
        if sql == INSERT_OUTBOX:
            rows += values
            if len(rows) >= _MOST_ROWS * _ROW:
                yield from _insertions(rows)
                rows = []
            continue
        if rows and sql in _READS_OUTBOX:
            yield from _insertions(rows)
            rows = []
        yield REPLACE_OPENED if sql == INSERT_OPENED else sql, values
    yield from _insertions(rows)


def _insertions(rows: list[object]) -> Iterator[tuple[str, Sequence[object]]]:
    """By powers of two: a connection keeps each of its last statements prepared, and one of a hundred
    rows takes 50 KB."""
    begin = 0
    while left := (len(rows) - begin) // _ROW:
        count = 1 << (left.bit_length() - 1)
        yield _insert_rows(count), rows[begin : begin + count * _ROW]
        begin += count * _ROW


@cache
def _insert_rows(count: int) -> str:
    return f"insert into outbox values {', '.join(['(?, ?, ?)'] * count)}"


def _without_ended(operations: list[Operation]) -> list[Operation]:
    """Without what is written to `opened` about requests that are opened and closed in it."""
    fresh: dict[object, list[int]] = {}  # the places of a request's operations
    left_out: set[int] = set()
    for place, (number, values) in enumerate(operations):
        sql = LOGGED[number]
        if sql == INSERT_OPENED:
            fresh[values[0]] = [place]
        elif sql == UPDATE_OPENED and values[1] in fresh:
            fresh[values[1]].append(place)
        elif sql == DELETE_OPENED and values[0] in fresh:
            left_out.update((*fresh.pop(values[0]), place))
    return [each for place, each in enumerate(operations) if place not in left_out]


def insert_opened(record: OpenedRequest) -> Statement:
    values = (record.request_id, _encode(record))
    return Statement(INSERT_OPENED, values, is_opening=True)


def update_opened(record: OpenedRequest) -> Statement:
    return Statement(UPDATE_OPENED, (_encode(record), record.request_id))


def move_to_outbox(event: UsageEvent) -> list[Statement]:
    return [
        _delete_opened(event.request_id),
        _insert_outbox(USAGE, event),
    ]


def insert_receipt(count: EngineCount) -> Statement:
    return _insert_outbox(RECEIPT, count)


def insert_moderation(events: Sequence[ModerationEvent]) -> Statement:
    return _insert_outbox(MODERATION, events)


def insert_answer(batch_id: str, answered: LineResult) -> Statement:
    """The answer to a line of a batch, to be committed together with its usage event."""
    return _insert_outbox(LINE, (batch_id, answered))


def delete_shipped(last: int) -> Statement:
    return Statement(DELETE_SHIPPED, (last,), outbox=-1)


def move_to_parked(seq: int, reason: str) -> list[Statement]:
    return [Statement(PARK_ROW, (reason, seq)), Statement(DELETE_ROW, (seq,), outbox=-1)]


def park_opened(request_id: str, reason: str) -> list[Statement]:
    """Move an open request that cannot be settled to `parked`."""
    return [
        Statement(
            "insert into parked (topic, body, reason) select ?, body, ? from opened"
            " where request_id = ?",
            (OPENED, reason, request_id),
        ),
        _delete_opened(request_id),
    ]


def return_to_outbox(topic: str, body: bytes) -> Statement:
    return Statement(INSERT_OUTBOX, (topic, body), outbox=1, is_numbered=True)


def _delete_opened(request_id: str) -> Statement:
    return Statement(DELETE_OPENED, (request_id,))


def _insert_outbox(topic: str, record: object) -> Statement:
    return return_to_outbox(topic, _encode(record))
