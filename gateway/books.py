"""Where the shipper delivers: the counting-house's and the safety desk's tables, in one commit."""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import func, select

from billing.models import UsageBatch, UsageEventRow
from core.clock import Clock
from core.database import Database, insert_new
from core.events import ModerationEvent, UsageEvent


class SqlBooks:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def record(self, usage: Sequence[UsageEvent], moderation: Sequence[ModerationEvent]) -> None:
        if not usage:
            return
        with self._database.transaction() as session:
            batch = UsageBatch(recorded_at=self._clock.now(), events=len(usage))
            session.add(batch)
            session.flush()
            rows = [{**asdict(event), "batch_id": batch.id} for event in usage]
            table = UsageEventRow.__table__
            new = insert_new(session, table, rows, "request_id")  # type: ignore[arg-type]
            if new != len(usage):
                batch.events = (
                    session.scalar(select(func.count()).where(UsageEventRow.batch_id == batch.id))
                    or 0
                )
