"""Repairs what the audit finds between usage events, charges and roll-ups: `tollhouse usage rebuild`.

Events of rated batches without a charge are rated, batches that were refused and are whole now are rated,
and every roll-up is computed again from the charges.
"""

from dataclasses import asdict, dataclass

from sqlalchemy import func, select

from billing.rating import rating
from billing.rating.rating_worker import rate_all
from billing.usage import rollups, service_rollups
from billing.usage.tables import UsageBatch
from core.clock import Clock
from core.database import Database


@dataclass(frozen=True, slots=True)
class Repaired:
    rated: int  # events that had no charge
    refused: int  # batches whose events are still not all there
    hours: int
    days: int

    def describe(self) -> dict[str, int]:
        return asdict(self)


def repair(database: Database, clock: Clock) -> Repaired:
    with database.transaction() as session:
        missed = rating.rate_missed(session, clock)
        rating.release_refused(session)
    waited = rate_all(database, clock)
    with database.transaction() as session:
        hours, days = rollups.rebuild(session)
        service_rollups.rebuild(session, clock)
        refused = select(func.count()).where(
            UsageBatch.refused_at.is_not(None), UsageBatch.rated_at.is_(None)
        )
        return Repaired(missed + waited, session.scalar(refused) or 0, hours, days)
