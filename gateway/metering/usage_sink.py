"""The usage sink of the shipper: writes usage and moderation events to the database in one commit."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from billing.usage import usage
from core.batches import jobs
from core.clock import Clock
from core.database import Database
from core.events import EngineCount
from gateway.metering.spool_records import OutboxBatch
from moderation.ingest import ingest

_counts = attrgetter(*EngineCount.__struct_fields__)


class SqlUsageSink:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def record(self, batch: OutboxBatch) -> None:
        with self._database.transaction() as session:
            usage.record(session, batch.usage, self._clock)
            for batch_id, answered in batch.lines:
                jobs.record_result(session, batch_id, answered)
            if batch.moderation:
                ingest(session, batch.moderation)
            if batch.receipts:
                usage.store_receipts(session, batch.receipts)

    def park(self, batch: OutboxBatch, reason: str) -> None:
        with self._database.transaction() as session:
            usage.park_refused(session, batch.usage, reason, self._clock)


def stored_counts(
    database: Database, request_ids: Sequence[str], engine_id: str
) -> list[EngineCount]:
    """Receipts that reached the database, of prompts that this engine ran."""
    with database.read() as session:
        return [
            EngineCount(*_counts(row))
            for row in usage.receipts_of(session, request_ids)
            if row.engine_id == engine_id
        ]


class UsageSink(Protocol):
    """The destination of usage events. A call is one transaction and idempotent."""

    def record(self, batch: OutboxBatch) -> None: ...

    def park(self, batch: OutboxBatch, reason: str) -> None:
        """Keep usage events that `record` refused permanently in the database, for an operator."""
