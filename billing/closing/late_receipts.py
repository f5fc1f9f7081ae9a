"""Receipts that came after their request was closed by the gateway's own count, because the connection to
the engine was lost for longer than a gateway waits.

What the engine had generated beyond that count was delivered to nobody: it is waived, by an event of its
own with the request's id and `LATE`, because events are never changed. So generated = billed + waived
holds again. It counts no request, and costs nothing.
"""

from datetime import timedelta
from typing import Any

from msgspec.structs import fields
from sqlalchemy import and_, case, func, literal, select
from sqlalchemy.orm import Session, aliased

from billing.closing.row_sums import BY_GATEWAY, UNBILLED, request_of
from billing.usage import usage
from billing.usage.retention import latest_retention
from billing.usage.tables import EngineReceipt, UsageEventRow
from core.clock import Clock
from core.database import Database
from core.events import SettledBy, UsageEvent, UsageKind
from core.ids import REQUEST, floor_id

LATE = ".late"  # ends the id of the event of what a late receipt waives
FINISH_REASON = "late_receipt"
WITHIN = timedelta(days=7)  # how old a request may be whose receipt is waited for
_AT_ONCE = 500
_NAMES = tuple(field.name for field in fields(UsageEvent))
E, R = UsageEventRow, EngineReceipt


def waived_late() -> Any:
    """SQL for the tokens of an event that a late receipt has waived since."""
    late = aliased(UsageEventRow)
    tokens = select(late.waived_tokens).where(late.request_id == E.request_id + literal(LATE))
    return case((BY_GATEWAY, func.coalesce(tokens.scalar_subquery(), 0)), else_=0)


def waive_late(database: Database, clock: Clock) -> int:
    """The number of requests whose late receipt was taken into account. A second run finds none. In
    transactions of bounded size."""
    with database.read() as session:
        found = _late(session, clock)
    for first in range(0, len(found), _AT_ONCE):
        with database.transaction() as session:
            usage.record(session, found[first : first + _AT_ONCE], clock)
    return len(found)


def _late(session: Session, clock: Clock) -> list[UsageEvent]:
    retained = latest_retention(session)
    oldest = max(
        floor_id(REQUEST, clock.now() - WITHIN), retained.floor_id if retained is not None else ""
    )
    request = request_of(session)
    generated = func.sum(R.generated_tokens)
    receipts = (
        select(request.label("request_id"), R.engine_id, generated.label("generated"))
        .where(R.request_id >= oldest)
        .group_by(request, R.engine_id)
        .subquery("receipts")
    )
    missing = receipts.c.generated - E.output_tokens - E.waived_tokens - waived_late()
    query = (
        select(E, missing.label("missing"))
        .join(
            receipts,
            and_(receipts.c.request_id == E.request_id, receipts.c.engine_id == E.engine_id),
        )
        .where(E.request_id >= oldest, BY_GATEWAY, ~UNBILLED, missing > 0)
    )
    return [_event(row, int(tokens), clock) for row, tokens in session.execute(query)]


def _event(row: UsageEventRow, tokens: int, clock: Clock) -> UsageEvent:
    values = {name: getattr(row, name) for name in _NAMES} | {
        "request_id": row.request_id + LATE,
        "kind": UsageKind(row.kind),
        "finished_at": clock.now(),
        "input_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "waived_tokens": tokens,
        "finish_reason": FINISH_REASON,
        "settled_by": SettledBy.RECEIPT,
        "quantity": 0,
        "units": 0,
        "busy_us": 0,
        "reordered_cached_tokens": 0,
        "counted_by": None,
    }
    return UsageEvent(**values)
