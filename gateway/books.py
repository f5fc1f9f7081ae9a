"""Where the shipper delivers: the counting-house's and the safety desk's tables, in one commit."""

from collections.abc import Sequence

from billing import usage as counting_house
from core.clock import Clock
from core.database import Database
from core.events import ModerationEvent, UsageEvent


class SqlBooks:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def record(self, usage: Sequence[UsageEvent], moderation: Sequence[ModerationEvent]) -> None:
        if not usage:
            return
        with self._database.transaction() as session:
            counting_house.record(session, usage, self._clock)
