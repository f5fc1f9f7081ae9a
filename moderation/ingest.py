"""Stores decisions and strikes from the gateway's spool, idempotently."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from core.events import ModerationEvent
from moderation.records import store
from moderation.strikes import count_blocked


def ingest(session: Session, events: Sequence[ModerationEvent]) -> int:
    """Store a batch of events; known events change nothing. Returns how many were new."""
    count_blocked(session, events)
    return store(session, events)
