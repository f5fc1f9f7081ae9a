"""The oldest usage that is kept: events before it were dropped."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.usage.tables import UsageRetention


def latest_retention(session: Session) -> UsageRetention | None:
    """The latest retention record, if any events were dropped."""
    return session.scalar(select(UsageRetention).order_by(UsageRetention.floor_id.desc()).limit(1))
