"""Leases on outbox and inbox rows. A worker leases a row for a limited time; if it dies, another worker
takes the row when the lease ends. Retry intervals double up to an hour and never end.
"""

import zlib
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, bindparam, select
from sqlalchemy.orm import InstrumentedAttribute

from billing.payments.tables import PaymentCommand, PaymentWebhook
from core.clock import Clock
from core.database import Database

LEASE_S = 180.0
# Consecutive unanswered calls after which a run stops calling the provider.
MAX_UNANSWERED = 3
LONGEST_PAUSE_S = 3600.0
Leased = TypeVar("Leased", PaymentCommand, PaymentWebhook)


def _next(
    row: type[Leased], open_: ColumnElement[bool], first: InstrumentedAttribute[Any]
) -> Select[Leased]:
    """The open row that has been due longest, ties by `first`. Skips locked rows."""
    due = row.next_at <= bindparam("now")
    return (
        select(row)
        .where(row.provider == bindparam("provider"), row.done_at.is_(None), open_, due)
        .order_by(row.next_at, first)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


# Built once: these queries run every few seconds and mostly find nothing.
NEXT_COMMAND = _next(PaymentCommand, PaymentCommand.failed.is_(False), PaymentCommand.id)
NEXT_EVENT = _next(PaymentWebhook, PaymentWebhook.parked.is_(None), PaymentWebhook.external_id)


def take(database: Database, clock: Clock, which: Select[Leased], provider: str) -> Leased | None:
    """Lease the next due row and count the attempt; None if none is due."""
    now = clock.now()
    with database.transaction() as session:
        found = session.scalar(which, {"provider": provider, "now": now})
        if found is not None:
            found.attempts += 1
            found.next_at = now + timedelta(seconds=LEASE_S)
        return found


def pause_s(key: str, attempts: int) -> float:
    """Exponential backoff in seconds, with jitter derived from the key so that runs are reproducible."""
    share = 0.75 + zlib.crc32(f"{key}:{attempts}".encode()) % 1000 / 2000
    return float(min(LONGEST_PAUSE_S, 5.0 * 2 ** min(attempts - 1, 12)) * share)
