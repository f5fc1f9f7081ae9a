"""Where the shipper delivers: the counting-house's and the safety desk's tables, in one commit."""

from dataclasses import astuple

from billing import usage
from core.clock import Clock
from core.database import Database
from gateway.spool import Outgoing


class SqlBooks:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def record(self, batch: Outgoing) -> None:
        with self._database.transaction() as session:
            usage.record(session, batch.usage, self._clock)
            if batch.receipts:
                usage.keep_receipts(session, [astuple(each) for each in batch.receipts])
