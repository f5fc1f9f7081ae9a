"""Stores what a stream holds in the database: commit first, acknowledge after it.

A consumer that dies between the two gets its messages again, and the database knows their records by
their ids. A record that can never be stored is parked in the database, where every operator sees it.
"""

import base64
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.orm import Session

from billing.usage import usage
from billing.usage.tables import ParkedEvent
from core.clock import Clock
from core.database import Database
from core.settings import Settings
from gateway.metering.parked_records import brief, is_permanent
from gateway.metering.streams.base import (
    Delivery,
    StreamDown,
    UsageStream,
    age_s,
    wait_until_stored,
)
from gateway.metering.streams.messages import (
    USAGE,
    Unreadable,
    batch_of,
    encoded,
    read,
    read_record,
)
from gateway.metering.streams.opening import open_stream
from gateway.metering.usage_sink import UsageSink

log = logging.getLogger("tollhouse.stream")
FETCH = 40  # messages, of some hundreds of records each
_KIND, _BODY = "stream_record", "base64"  # of a parked record's payload


@dataclass(frozen=True, slots=True)
class StreamStore:
    stream: UsageStream
    sink: UsageSink  # of the database
    database: Database
    clock: Clock

    def store_next(self, wait_s: float) -> int:
        """Store the next messages; returns their number. What it raises passes: the messages are
        delivered again."""
        deliveries = self.stream.fetch(FETCH, wait_s)
        if not deliveries:
            return 0
        try:
            self._store(deliveries)
        except Exception:
            self.stream.give_back(deliveries)
            raise
        self.stream.acknowledge(deliveries)
        return len(deliveries)

    def _store(self, deliveries: Sequence[Delivery]) -> None:
        found = read(each.body for each in deliveries)
        try:
            if found.records:
                self.sink.record(found.batch())
        except Exception as error:
            if not is_permanent(error):
                raise
            log.error("records of the stream were refused; storing them singly: %s", brief(error))
            for kind, record in found.records:
                self._store_single(kind, record)
        if found.unreadable:
            names = ", ".join(each.name for each in deliveries)
            log.error("messages of the stream cannot be read and are parked; from: %s", names)
            self._park(found.unreadable)

    def _store_single(self, kind: str, record: object) -> None:
        batch = batch_of([(kind, record)])
        try:
            self.sink.record(batch)
            return
        except Exception as error:
            if not is_permanent(error):
                raise
            reason = brief(error)
        log.error("a record of the stream was refused and is parked: %s", reason)
        if kind == USAGE:
            try:
                self.sink.park(batch, reason)
                return
            except Exception as error:
                if not is_permanent(error):
                    raise
        self._park([Unreadable(kind, encoded(record), reason)])

    def _park(self, records: Sequence[Unreadable]) -> None:
        with self.database.transaction() as session:
            for each in records:
                body = base64.b64encode(each.body).decode()
                payload = {_KIND: each.kind, _BODY: body}
                usage.park_payload(session, payload, each.reason, self.clock)


def release_parked(database: Database, sink: UsageSink, clock: Clock) -> int:
    """Retry records that a stream's consumer has parked; returns how many were stored."""
    with database.read() as session:
        waiting = [
            (row.request_id, row.payload)
            for row in usage.parked(session)
            if isinstance(row.payload, dict) and _BODY in row.payload
        ]
    released = 0
    for request_id, payload in waiting:
        try:
            sink.record(read_record(payload[_KIND], base64.b64decode(payload[_BODY])))
        except Exception as error:
            if not is_permanent(error):
                raise
            continue
        with database.transaction() as session:
            _mark_released(session, request_id, clock)
        released += 1
    return released


def _mark_released(session: Session, request_id: str, clock: Clock) -> None:
    row = session.get(ParkedEvent, request_id)
    if row is not None:
        row.released_at = clock.now()


_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class StreamState:
    messages: int = 0  # not in the database yet
    age_s: float = 0.0  # of the oldest
    problem: str = ""  # why the stream cannot be read


def stream_state(settings: Settings, clock: Clock) -> StreamState:
    """An empty state without a stream. SettingError for a stream that would lose messages."""
    if not settings.stream_url:
        return StreamState()
    with closing(open_stream(settings.stream_url, timeout_s=_TIMEOUT_S)) as stream:
        try:
            lag = stream.lag()
        except StreamDown as error:
            return StreamState(problem=str(error))
    return StreamState(lag.messages, age_s(lag.oldest, clock))


def wait_for_stream(settings: Settings, timeout_s: float) -> None:
    """Wait briefly until what the stream holds now is in the database, if there is a stream."""
    if not settings.stream_url:
        return
    with closing(open_stream(settings.stream_url, timeout_s=_TIMEOUT_S)) as stream:
        try:
            wait_until_stored(stream, timeout_s)
        except StreamDown as error:
            log.warning("%s", error)


@dataclass(frozen=True, slots=True)
class StreamTransit:
    """Billing's port UsageInTransit: an audit asks it for usage that is late."""

    settings: Settings
    clock: Clock

    def late(self, age: timedelta) -> int:
        state = stream_state(self.settings, self.clock)
        if state.problem:
            raise StreamDown(state.problem)
        return state.messages if state.age_s > age.total_seconds() else 0
