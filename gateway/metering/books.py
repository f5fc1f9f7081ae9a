"""The usage sink of the shipper: writes usage and moderation events to the database in one commit."""

from operator import attrgetter

from billing import usage
from core.batches import jobs
from core.clock import Clock
from core.database import Database
from gateway.metering.spool import Outgoing
from moderation.intake import take_in

_row = attrgetter(
    "request_id", "engine_id", "prompt_tokens", "cached_tokens", "generated_tokens", "received_at"
)


class SqlBooks:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def record(self, batch: Outgoing) -> None:
        with self._database.transaction() as session:
            usage.record(session, batch.usage, self._clock)
            for batch_id, answered in batch.lines:
                jobs.note(session, batch_id, answered)
            if batch.moderation:
                take_in(session, batch.moderation)
            if batch.receipts:
                usage.keep_receipts(session, [_row(each) for each in batch.receipts])
